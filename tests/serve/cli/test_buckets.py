"""Buckets of `duetto buckets` against brute force, in engines, and what is refused."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from fakes.greedy import greedy_programs
from suite.fixtures import ROOT, Model, random_model
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.serve.cli.buckets import read_request_lengths
from duetto.serve.cli.main import main
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.buckets import StepTokens, choose_edges, padding_share, simulate_steps
from duetto.serve.planner.buckets import lone_chunk_lengths as alone_of
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Sizes, can_share_prefill, prefill_shapes, shape_table

DEMO = ROOT / "checkpoints" / "demo"


@pytest.mark.parametrize("seed", range(12))
def test_edges_have_the_least_padding_that_brute_force_finds(seed: int):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 193, draw.integers(1, 30)).tolist()
    programs = int(draw.integers(2, 6))
    smallest = int(draw.choice([16, 48]))
    edges = choose_edges(lengths, programs, 192, smallest)
    free = [edge for edge in range(smallest, 192, 16) if edge != 64]
    tables = [
        tuple(sorted({*chosen, 64, 192})) for n in range(programs - 1) for chosen in combinations(free, n)
    ]
    steps = [StepTokens(n, (), 0) for n in lengths]
    assert padding_share(steps, edges) == min(padding_share(steps, each) for each in tables)
    assert len(edges) <= programs and 64 in edges and edges[-1] == 192


def test_padding_counts_chunks_alone_and_prefills_that_are_shared():
    steps = [StepTokens(70, (), 3), StepTokens(90, (128,), 1), StepTokens(0, (), 4)]
    assert alone_of(steps) == [70]
    assert padding_share(steps, (64, 96, 128)) == 1 - 160 / (96 + 128)


def test_edges_that_no_length_needs_are_not_made():
    assert choose_edges([512, 512], 8, 512) == (64, 512)
    assert choose_edges([], 2, 64) == (64,)
    assert choose_edges([5, 120], 3, 128, min_edge=48) == (48, 64, 128)


def test_invalid_edges_are_refused():
    with pytest.raises(ValueError, match="lengths up to 528 .* last edge is 512"):
        choose_edges([513], 4, 512)
    with pytest.raises(ValueError, match=r"programs 1 is not allowed: \[64, 512\]"):
        choose_edges([5], 1, 512)


SIZES = {"max_num_seqs": 3, "max_prefill_tokens": 64, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    model = random_model("tiny")
    with LLM.from_params(model.config, model.params, **SIZES) as llm:
        yield llm


def tokens_of(llm: LLM, work: list[tuple[int, int]], **params) -> list[list[int]]:
    asked = [SamplingParams(**params, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
    prompts = [{"prompt_token_ids": [1 + i % 290 for i in range(p)]} for p, _ in work]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, asked, use_tqdm=False)]


@pytest.mark.parametrize("longest, kinds", [(64, 2), full(128, 3)])
@greedy_programs()
def test_simulated_steps_equal_those_of_an_engine(one_layer: Model, longest: int, kinds: int):
    """Of an engine whose classes leave no shape out."""
    work, sizes = (
        [(5, 3), (130, 9), (70, 1), (64, 4), (200, 6), (3, 12)],
        SIZES | {"max_prefill_tokens": longest},
    )
    steps = list(simulate_steps(work, EngineOptions(**sizes)))
    assert sum(step.tokens for step in steps) == sum(p for p, _ in work)
    with LLM.from_params(
        one_layer.config, one_layer.params, reproducible=False, max_prefill_delay=0.0, **sizes
    ) as llm:
        tokens_of(llm, work, temperature=0.0)
        taken = llm.report()["steps"]
    names = [f"prefill[{n // 32},32]" for step in steps for n in step.shared_areas]
    names += ["prefill[2,32]" if n <= 32 else f"prefill[1,{64 if n <= 64 else 128}]" for n in alone_of(steps)]
    assert len(set(names)) == kinds
    names += [f"decode[{1 if step.rows == 1 else 8},1]" for step in steps if step.rows]
    assert taken == Counter(names)


def test_the_command_prints_edges_that_the_flag_takes(tmp_path, capsys):
    (file := tmp_path / "in.jsonl").write_text('{"prompt": "def add(a, b):", "max_tokens": 4}\n' * 5)
    assert main(["buckets", str(file), "--programs", "3", "--max-prefill-tokens", "128"]) == 0
    powers, best = (line.split() for line in capsys.readouterr().out.splitlines())
    assert powers[-2:] == ["--prefill-buckets", "64,128"] and best[-2] == "--prefill-buckets"
    EngineOptions(max_prefill_tokens=128, prefill_buckets=tuple(map(int, best[-1].split(","))))
    (empty := tmp_path / "empty.jsonl").touch()
    assert main(["buckets", str(empty)]) == 1
    assert "there is no request in it" in capsys.readouterr().err


@pytest.mark.full
def test_buckets_change_no_token(plain: LLM):
    model, work = random_model("tiny"), [(3, 9), (17, 9), (90, 9), (150, 9)]
    with LLM.from_params(model.config, model.params, prefill_buckets=(16, 48, 64), **SIZES) as llm:
        found = tokens_of(llm, work, temperature=0.8, seed=5)
    assert found == tokens_of(plain, work, temperature=0.8, seed=5)


def test_a_table_has_the_buckets_asked_for():
    def shapes(longest: int, shared: bool = True) -> list[tuple[int, int]]:
        found = prefill_shapes(EngineOptions(prefill_buckets=(48, 192, 512)), longest, shared, "cpu")
        return [(shape.rows, shape.tokens) for shape in found]

    assert shapes(512) == [(1, 48), (1, 64), (1, 192), (1, 512), (2, 32), (4, 32), (8, 32), (16, 32)]
    assert shapes(512, shared=False) == [(1, 48), (1, 64), (1, 192), (1, 512)]
    assert shapes(100) == [
        (1, 48),
        (1, 64),
        (1, 128),
        (2, 32),
        (4, 32),
    ]  # requests are shorter than a prefill may be


def test_a_latent_models_prompts_never_share():
    shapes = shape_table(
        EngineOptions(),
        Sizes(512, 8, (64,), 64),
        can_share_prefill(random_model("latent").config.layers),
        "cpu",
    )
    assert can_share_prefill(PRESETS["135m"].layers) and {s.rows for s in shapes if s.phase == "prefill"} == {
        1
    }


@pytest.mark.parametrize("edges", [(), (64, 190, 512), (192, 64, 512), (64, 64, 512), (0, 512), (64, 256)])
def test_invalid_buckets_are_refused(edges: tuple[int, ...]):
    with pytest.raises(
        ValueError, match="prefill_buckets .* rising multiples of 16, of which the last is 512"
    ):
        EngineOptions(prefill_buckets=edges, max_prefill_tokens=512)


def test_the_last_bucket_is_the_default_longest_prefill():
    assert EngineOptions(prefill_buckets=(64, 256)).with_device_load(None).max_prefill_tokens == 256
    with pytest.raises(ValueError, match="of which the last is 320"):
        EngineOptions(prefill_buckets=(64, 272))


def test_lengths_of_a_batch_file():
    found = read_request_lengths(str(ROOT / "examples" / "prompts.jsonl"), DEMO)
    assert found and all(p > 0 and n > 0 for p, n in found)


def test_a_line_or_file_that_is_wrong_is_named(tmp_path, capsys):
    (file := tmp_path / "lines").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    for name, said in (
        (file, f"{file}: line 2: prompt=5 is not allowed"),
        (tmp_path / "none", "No such file"),
    ):
        assert main(["buckets", str(name)]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
