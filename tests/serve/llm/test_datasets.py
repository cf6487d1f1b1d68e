"""Prompts of benchmarks that scripts for vLLM ask for."""

import json

import pytest
from cases.text.letters import letters

from duetto.compat.argparse_utils import FlexibleArgumentParser
from duetto.compat.datasets import add_dataset_parser, get_samples


def samples(words: list[str]):
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    return get_samples(parser.parse_args(words), letters())


def test_random_prompts_follow_from_the_seed():
    words = ["--num-prompts", "3", "--random-input-len=7", "--random-output-len=9"]
    found = samples(words)
    assert [(s.prompt_len, s.expected_output_len) for s in found] == [(7, 9)] * 3
    assert found == samples(words) != samples([*words, "--seed", "1"])


def test_conversations_of_a_file(tmp_path):
    file = tmp_path / "talks.json"
    turns = [[{"value": "ab"}, {"value": "cde"}], [{"value": "alone"}], [{"value": "f"}, {"value": "g"}]]
    file.write_text(json.dumps([{"conversations": t} for t in turns]))
    found = samples(["--dataset-name", "sharegpt", "--dataset-path", str(file), "--disable-shuffle"])
    assert [(s.prompt, s.prompt_len, s.expected_output_len) for s in found] == [("ab", 2, 3), ("f", 1, 1)]


def test_a_dataset_without_its_file_is_refused():
    with pytest.raises(ValueError, match="--dataset-name custom needs a file: set --dataset-path"):
        samples(["--dataset-name", "custom"])
