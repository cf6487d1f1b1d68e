"""What is read of a folder's `generation_config.json`, and what is refused."""

import json
import re

import pytest
from cases.folders import change_config

from duetto.checkpoints.generation import GenerationDefaults, read_generation_config
from duetto.checkpoints.tensors import CheckpointError
from duetto.serve.engine.startup.model_folder import load_folder


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, GenerationDefaults()),
        ({"eos_token_id": 2, "bos_token_id": 1}, None, GenerationDefaults((2,), 1)),
        ({"eos_token_id": [2, 3]}, {}, GenerationDefaults((2, 3))),
        (
            {"eos_token_id": 2, "bos_token_id": 1},
            {"eos_token_id": [7, 0]},
            GenerationDefaults((7, 0, 2), 1),
        ),
        ({"eos_token_id": 2}, {"eos_token_id": None, "bos_token_id": 0}, GenerationDefaults((2,), 0)),
        (
            {},
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.9,
                "min_p": None,
                "max_length": 9,
            },
            GenerationDefaults(sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.9}),
        ),
        ({}, {"repetition_penalty": 1.1}, GenerationDefaults(sampling={"repetition_penalty": 1.1})),
        ({}, {"do_sample": False, "temperature": 0.6}, GenerationDefaults(sampling={"temperature": 0.6})),
        (
            {},
            {"do_sample": False, "repetition_penalty": 1.1},
            GenerationDefaults(sampling={"repetition_penalty": 1.1}),
        ),
        ({"eos_token_id": 99999}, None, GenerationDefaults((99999,))),  # beyond the vocabulary: never drawn
    ],
)
def test_generation_defaults(folder, config, generation, expected):
    change_config(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_config(folder) == expected


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
        ({"eos_token_id": 2**40}, "eos_token_id is 1099511627776, expected a token id or a list of them"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_p": True}, "top_p is True"),
    ],
)
def test_generation_defaults_of_wrong_types_are_refused(folder, generation, words):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match=re.escape("generation_config.json: " + words)):
        read_generation_config(folder)


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"temperature": -1}, "generation_config.json: temperature=-1 is not allowed"),
        ({"temperature": float("nan")}, "generation_config.json: temperature=nan is not allowed"),
        ({"temperature": 10**400}, "generation_config.json: "),
        ({"top_p": 7}, "generation_config.json: top_p=7 is not allowed"),
        ({"top_k": -5}, "generation_config.json: top_k=-5 is not allowed"),
        ({"repetition_penalty": 0}, "generation_config.json: repetition_penalty=0 is not allowed"),
        ({"eos_token_id": list(range(65))}, "eos_token_id has 65 ids, expected at most 64"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_generation_defaults_beyond_the_sampler_are_refused(folder, generation, words):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match=re.escape(words)) as e:
        load_folder(folder, "auto")
    assert "\n" not in str(e.value) and str(folder) in str(e.value)


def test_wrong_end_tokens_are_refused_with_their_file(folder):
    change_config(folder, eos_token_id=2.5)
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is 2\.5"):
        read_generation_config(folder)
