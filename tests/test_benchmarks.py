"""The benchmark suite in small: buckets against brute force, traces, and a run whose figures are checked, not
timed."""

# pyright: reportMissingImports=false

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, random_model

from benchmarks import alone, beside
from benchmarks.__main__ import main as run_benchmarks
from benchmarks.engines import OURS, Answer, Served, Setting
from benchmarks.engines import ours as ours_module
from benchmarks.harness import QUICK, Bench, Row, rows_of
from benchmarks.models import folder_for, gguf_name, interleaved
from benchmarks.report import Result, load, save
from benchmarks.table import block, fill
from benchmarks.traces import (
    AZURE,
    BLOCK,
    MOONCAKE,
    Scale,
    conversations,
    read,
    replayed,
    with_prefixes,
)
from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import read_config
from duetto.checkpoints.huggingface import save as save_model
from duetto.serve.cli import main
from duetto.serve.commands.buckets import Step, best_edges, lengths_of, padding, rehearse
from duetto.serve.commands.buckets import alone as alone_of
from duetto.serve.options.engine import EngineOptions
from duetto.serve.programs.shapes import Sizes, can_share, prefills, table
from duetto.serve.roofline.presets import PRESETS

DEMO = ROOT / "checkpoints" / "demo"


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize("seed", range(12))
def test_edges_have_the_least_padding_that_brute_force_finds(seed: int):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 193, draw.integers(1, 30)).tolist()
    programs = int(draw.integers(2, 6))
    smallest = int(draw.choice([16, 48]))
    edges = best_edges(lengths, programs, 192, smallest)
    free = [edge for edge in range(smallest, 192, 16) if edge != 64]
    tables = [
        tuple(sorted({*chosen, 64, 192})) for n in range(programs - 1) for chosen in combinations(free, n)
    ]
    steps = [Step(n, (), 0) for n in lengths]
    assert padding(steps, edges) == min(padding(steps, each) for each in tables)
    assert len(edges) <= programs and 64 in edges and edges[-1] == 192


def test_padding_counts_chunks_alone_and_prefills_that_are_shared():
    steps = [Step(70, (), 3), Step(90, (128,), 1), Step(0, (), 4)]
    assert alone_of(steps) == [70]
    assert padding(steps, (64, 96, 128)) == 1 - 160 / (96 + 128)


def test_edges_that_no_length_needs_are_not_made():
    assert best_edges([512, 512], 8, 512) == (64, 512)
    assert best_edges([], 2, 64) == (64,)
    assert best_edges([5, 120], 3, 128, smallest=48) == (48, 64, 128)


def test_edges_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="lengths up to 528 .* last edge is 512"):
        best_edges([513], 4, 512)
    with pytest.raises(ValueError, match=r"programs 1 is not allowed: \[64, 512\]"):
        best_edges([5], 1, 512)


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


@pytest.mark.parametrize("longest, kinds", [(64, 1), (128, 3)])
def test_a_rehearsal_takes_the_steps_that_an_engine_takes(longest: int, kinds: int):
    """Of an engine whose classes leave no shape out."""
    work, sizes = (
        [(5, 3), (130, 9), (70, 1), (64, 4), (200, 6), (3, 12)],
        SIZES | {"max_prefill_tokens": longest},
    )
    steps = list(rehearse(work, EngineOptions(**sizes)))
    assert sum(step.tokens for step in steps) == sum(p for p, _ in work)
    model = random_model("tiny")
    with LLM.from_params(model.config, model.params, reproducible=False, **sizes) as llm:
        tokens_of(llm, work, temperature=0.0)
        taken = llm.report()["steps"]
    names = [f"prefill[{n // 32},32]" if n > 64 else "prefill[1,64]" for step in steps for n in step.shared]
    names += [f"prefill[1,{64 if n <= 64 else 128}]" for n in alone_of(steps)]
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


def test_buckets_change_no_token(plain: LLM):
    model, work = random_model("tiny"), [(3, 9), (17, 9), (90, 9), (150, 9)]
    with LLM.from_params(model.config, model.params, prefill_buckets=(16, 48, 64), **SIZES) as llm:
        found = tokens_of(llm, work, temperature=0.8, seed=5)
    assert found == tokens_of(plain, work, temperature=0.8, seed=5)


def test_a_table_has_the_buckets_asked_for():
    def shapes(longest: int, shared: bool = True) -> list[tuple[int, int]]:
        found = prefills(EngineOptions(prefill_buckets=(48, 192, 512)), longest, shared)
        return [(shape.rows, shape.tokens) for shape in found]

    assert shapes(512) == [(1, 48), (1, 64), (1, 192), (1, 512), (8, 32), (16, 32)]
    assert shapes(512, shared=False) == [(1, 48), (1, 64), (1, 192), (1, 512)]
    assert shapes(100) == [(1, 48), (1, 64), (1, 128), (4, 32)]  # requests are shorter than a prefill may be


def test_a_latent_models_prompts_never_share():
    shapes = table(
        EngineOptions(), Sizes(512, 8, (64,), 64), can_share(random_model("latent").config.layers), "cpu"
    )
    assert can_share(PRESETS["135m"].layers) and {s.rows for s in shapes if s.phase == "prefill"} == {1}


@pytest.mark.parametrize("edges", [(), (64, 190, 512), (192, 64, 512), (64, 64, 512), (0, 512), (64, 256)])
def test_buckets_that_cannot_be_are_refused(edges: tuple[int, ...]):
    with pytest.raises(
        ValueError, match="prefill_buckets .* rising multiples of 16, of which the last is 512"
    ):
        EngineOptions(prefill_buckets=edges)


def test_lengths_of_a_batch_file():
    found = lengths_of(str(ROOT / "examples" / "prompts.jsonl"), DEMO)
    assert found and all(p > 0 and n > 0 for p, n in found)


# ---------------------------------------------------------------- traces


def test_traces_are_what_their_readme_says():
    azure, mooncake = read(AZURE), read(MOONCAKE)
    assert len(azure) == 2000 and azure[0].prompt == 374 and azure[0].output == 44
    assert 1050 < np.mean([e.prompt for e in azure]) < 1150
    assert len(mooncake) == 1000
    assert all(len(e.blocks) == -(-e.prompt // BLOCK) for e in mooncake)
    for entries in (azure, mooncake):
        assert all(a.arrival <= b.arrival for a, b in pairwise(entries))
    assert sum(file.stat().st_size for file in (AZURE, MOONCAKE)) < 100_000


def test_the_full_files_are_read_too(tmp_path: Path):
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    mooncake.write_text('{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}\n')
    assert [(round(e.arrival, 3), e.prompt, e.output) for e in read(azure)] == [
        (0, 374, 44),
        (4.315, 396, 109),
    ]
    assert (read(mooncake)[0].arrival, read(mooncake)[0].blocks) == (0.5, (0, 3))
    azure.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="are not those of a trace"):
        read(azure)


def test_requests_share_the_tokens_of_the_blocks_that_they_share():
    entries = conversations(read(MOONCAKE), 20, 4096)
    requests = with_prefixes(entries, 300, 8)
    assert len(entries) >= 20 and all(e.prompt <= 4096 for e in entries)
    assert requests == with_prefixes(entries, 300, 8)
    for e, r in zip(entries, requests, strict=True):
        assert len(r.prompt) == max(e.prompt // 8, 1) and min(r.prompt) >= 3
    first, later = (requests[i].prompt[: BLOCK // 8] for i in (0, -1))
    assert (first == later) == (entries[0].blocks[0] == entries[-1].blocks[0])


def test_arrivals_are_stretched_to_a_rate():
    entries = [Scale(8, 64, 8)(e) for e in read(AZURE)[:50]]
    assert max(e.prompt for e in entries) == 64 and min(e.output for e in entries) >= 1
    requests = replayed(entries, 300, rate=2.0)
    assert requests[-1].arrival == pytest.approx(25) and requests[0].arrival == 0


# ---------------------------------------------------------------- the harness


class Here:
    """An engine of ours in this process, with one program less to compile and all calls of a worker."""

    def __init__(self, name: str, folder: Path, setting: Setting):
        options = {"page_size": 64, "max_prefill_tokens": 64, **setting.options}
        options.pop("prefill_buckets", None)
        self.engine = ours_module.Ours(folder, "auto", Setting(setting.seats, setting.longest, options))
        self.serve, self.decode, self.prefill = self.engine.serve, self.engine.decode, self.engine.prefill

    def close(self) -> None:
        self.engine.llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, path = random_model("tiny"), tmp_path_factory.mktemp("tiny")
    save_model(path, model.config, model.params)
    return path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("benchmarks.harness", "benchmarks.alone"):
        monkeypatch.setattr(f"{module}.Worker", Here, raising=False)
    made = Bench(folder, QUICK, [OURS], Scale(32, 48, 4), seats=8)
    yield made
    made.close()


def test_throughput_serves_every_request_of_the_trace(bench: Bench):
    rows = list(beside.throughput(bench))
    assert [(row.engine, row.unit) for row in rows] == [(OURS, "tokens/s")]
    assert rows[0].median > 0
    assert bench.notes[0].startswith("24 requests, ")


def test_prefixes_are_found_where_caching_is_on(bench: Bench):
    rows = {(row.engine, row.unit): row.median for row in alone.prefix(bench)}
    assert rows["caching", "s"] > 0 and rows["no caching", "s"] > 0
    assert 5 < rows["caching", "%"] < 95


def test_better_edges_have_less_padding(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alone, "padding_time", lambda *_: iter(()))
    rows = {(row.what, row.engine): row.median for row in alone.padding(bench)}
    for what in ("Azure: prefill", "Mooncake, nothing cached: prefill"):
        shares = [rows[what, table] for table in (alone.POWERS, *map(alone.best, alone.PROGRAMS))]
        assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0]


def test_ratios_are_taken_pair_by_pair():
    found = {OURS: [1.0, 2.0, 4.0], "peer": [2.0, 2.0, 12.0]}
    ms, rate = (list(rows_of("p", "w", unit, found)) for unit in ("ms", "tokens/s"))
    assert ms[0].faster == {} and ms[1].faster == {OURS: 2.0}
    assert rate[1].faster == {OURS: 0.5}


def test_an_engine_that_fails_is_left_out(bench: Bench):
    bench.engines = ["no such engine", OURS]
    bench.workers |= {"no such engine": Failing(), OURS: Working()}  # type: ignore[dict-item]
    found = bench.in_turns(bench.engines, 1, lambda w: w.decode(1, 8, 1))
    assert list(found) == [OURS] == bench.engines
    assert "no such engine is left out: it broke" in bench.notes[0]


class Working:
    def decode(self, *_: int) -> float:
        return 1.0

    def close(self) -> None:
        pass


class Failing(Working):
    def decode(self, *_: int) -> float:
        raise BrokenPipeError("it broke")


def test_spans_are_those_of_answers_with_more_than_one_token():
    run = Served(1.0, [Answer(0.1, 0.5, [1, 2, 3]), Answer(0.3, 0.3, [1]), Answer(None, 1.0, [1, 2])])
    assert beside.spans(run)["TPOT p50"] == pytest.approx(0.2)
    assert beside.spans(run)["TTFT p50"] == pytest.approx(0.2)


# ---------------------------------------------------------------- results and models


def test_results_come_back_from_their_file_and_fill_documents(tmp_path: Path):
    rows = [
        Row("decode", "1 rows", OURS, "ms", [10.0, 30.0]),
        Row("decode", "1 rows", "peer", "ms", [40.0], {OURS: 2.0}),
    ]
    save(tmp_path / "new" / "r.json", {"date": "2026-01-01"}, ["a note"], rows)
    result = load(tmp_path / "new" / "r.json")
    assert result == Result({"date": "2026-01-01"}, ["a note"], rows)
    text = "a\n<!-- benchmarks: decode -->\nold\n<!-- end -->\nb\n"
    filled = fill(text, result)
    assert "| 1 rows | ms | 20 | 40 (2.00 x) |" in filled and "old" not in filled
    assert fill(filled, result) == filled
    with pytest.raises(ValueError, match="serving: this run has no such part"):
        block(result, "serving")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json: has no about"):
        load(tmp_path / "other.json")


def test_a_summary_has_a_few_figures_of_the_engines_that_have_all_of_them():
    figures = [
        *(("throughput", "at once", "tokens/s"), ("throughput", "at once: equal", "%")),
        *(("decode", f"{n} rows", "ms") for n in (1, 8, 32)),
        *(("prefill", f"{n} tokens", "tokens/s") for n in (64, 512)),
    ]
    rows = [Row(part, what, OURS, unit, [1.0]) for part, what, unit in figures]
    rows += [Row(part, what, "peer", unit, [2.0], {OURS: 2.0}) for part, what, unit in figures if unit != "%"]
    rows.append(Row("decode", "1 rows", "decodes only", "ms", [3.0], {OURS: 3.0}))
    found = block(Result({}, [], rows), "summary").splitlines()
    assert found[0] == f"| | unit | {OURS} | peer |"
    assert [line.split(" | ")[0] for line in found[2:]] == [
        "| at once",
        "| 1 rows",
        "| 32 rows",
        "| 512 tokens",
    ]
    with pytest.raises(ValueError, match="summary: this run has no such part"):
        block(Result({}, [], []), "summary")


def test_unknown_parts_and_engines_are_refused(capsys: pytest.CaptureFixture[str]):
    assert run_benchmarks(["nonsense"]) == 2
    assert "part 'nonsense' is unknown: programs, decode" in capsys.readouterr().err
    assert run_benchmarks(["--model", "demo", "--engines", "x"]) == 2
    assert "engine 'x' is unknown or not installed" in capsys.readouterr().err
    assert run_benchmarks(["--model", "9t"]) == 2
    assert "9t" in capsys.readouterr().err


def test_a_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PRESETS, "135m", random_model("tiny").config)
    folder = folder_for("135m", tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert read_config(folder) == random_model("tiny").config
    assert folder_for("135m", tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_names_and_rows_are_those_of_llama_cpp():
    assert gguf_name("model.layers.3.self_attn.q_proj.weight") == "blk.3.attn_q.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    rows = np.arange(8)[:, None]  # two heads of four: (0 1 | 2 3) and (4 5 | 6 7)
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
