"""The benchmark suite in small: a run whose figures are checked, and its documents."""

from pathlib import Path

import numpy as np
import pytest
from suite.fixtures import ROOT, random_model

from benchmarks.__main__ import main as run_benchmarks
from benchmarks.engines import OURS, Answer, Served, Setting
from benchmarks.engines import ours as ours_module
from benchmarks.harness import QUICK, Bench, Row, rows_of
from benchmarks.models import folder_for, gguf_name, interleaved
from benchmarks.parts import alone, beside, scoring
from benchmarks.report import Result, load, save
from benchmarks.table import block, fill
from benchmarks.traces import Scale
from duetto.checkpoints.huggingface import read_config
from duetto.checkpoints.huggingface import save_hf as save_model
from duetto.serve.planner.roofline.presets import PRESETS

DEMO = ROOT / "checkpoints" / "demo"


class Here:
    """An engine of ours in this process, with one program less to compile and all calls of a worker."""

    def __init__(self, name: str, folder: Path, setting: Setting):
        options = {"page_size": 64, "max_prefill_tokens": 64, **setting.options}
        options.pop("prefill_buckets", None)
        self.engine = ours_module.Ours(folder, "auto", Setting(setting.seats, setting.longest, options))
        self.serve, self.decode, self.prefill = self.engine.serve, self.engine.decode, self.engine.prefill
        self.name, self.score = name, self.engine.score

    def close(self) -> None:
        self.engine.llm.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, path = random_model("tiny"), tmp_path_factory.mktemp("tiny")
    save_model(path, model.config, model.params)
    return path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("benchmarks.harness", "benchmarks.parts.alone"):
        monkeypatch.setattr(f"{module}.Worker", Here, raising=False)
    made = Bench(folder, QUICK, [OURS], Scale(32, 48, 4), seats=8)
    yield made
    made.close()


def test_throughput_serves_every_request_of_the_trace(bench: Bench):
    rows = list(beside.throughput(bench))
    assert [(row.engine, row.unit) for row in rows] == [(OURS, "tokens/s")]
    assert rows[0].median > 0
    assert bench.notes[0].startswith("24 requests, ")


def test_scores_of_documents_and_choices_are_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    for name, lengths in (("LENGTHS", (9, 20)), ("CONTEXT", (10, 20)), ("CONTINUATION", (2, 3))):
        monkeypatch.setattr(scoring, name, lengths)
    rows = list(scoring.scoring(bench))
    assert [row.unit for row in rows] == ["tokens/s", "tokens/s"] and all(row.median > 0 for row in rows)
    assert rows[1].what.startswith("4 questions of 4 choices, ")


@pytest.mark.full
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


def test_results_come_back_from_their_file_and_fill_documents(tmp_path: Path):
    rows = [
        Row("decode", "1 rows", OURS, "ms", [10.0, 30.0]),
        Row("decode", "1 rows", "peer", "ms", [40.0], {OURS: 2.0}),
    ]
    save(tmp_path / "new" / "r.json", {"date": "2026-01-01"}, ["a note"], rows)
    result = load(tmp_path / "new" / "r.json")
    assert result == Result({"date": "2026-01-01"}, ["a note"], rows)
    text = "a\n<!-- benchmarks: decode -->\nold\n<!-- end -->\nb\n"
    filled = fill(text, [result])
    assert "| 1 rows | ms | 20 | 40 (2.00 x) |" in filled and "old" not in filled
    assert fill(filled, [result]) == filled
    earlier = Result({}, [], [*rows, Row("serving", "p50", OURS, "ms", [7.0])])
    assert block([earlier, result], "decode") == block([result], "decode")
    assert "| p50 | ms | 7 |" in block([earlier, result], "serving")
    with pytest.raises(ValueError, match="serving: no run has such a part"):
        block([result], "serving")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json: has no about"):
        load(tmp_path / "other.json")


def test_a_summary_has_few_figures_of_complete_engines():
    figures = [
        *(("throughput", "at once", "tokens/s"), ("throughput", "at once: equal", "%")),
        *(("decode", f"{n} rows", "ms") for n in (1, 8, 32)),
        *(("prefill", f"{n} tokens", "tokens/s") for n in (64, 512)),
    ]
    rows = [Row(part, what, OURS, unit, [1.0]) for part, what, unit in figures]
    rows += [Row(part, what, "peer", unit, [2.0], {OURS: 2.0}) for part, what, unit in figures if unit != "%"]
    rows.append(Row("decode", "1 rows", "decodes only", "ms", [3.0], {OURS: 3.0}))
    found = block([Result({}, [], rows)], "summary").splitlines()
    assert found[0] == f"| | unit | {OURS} | peer |"
    assert [line.split(" | ")[0] for line in found[2:]] == [
        "| at once",
        "| 1 rows",
        "| 32 rows",
        "| 512 tokens",
    ]
    with pytest.raises(ValueError, match="summary: no run has such a part"):
        block([Result({}, [], [])], "summary")


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
