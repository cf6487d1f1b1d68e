"""A cold engine serves with its first programs while the others are compiled; when those come changes no
result."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.kvcache.tables import PageTables
from duetto.serve.engine.startup import start
from duetto.serve.runtime.compiled.local_executor import LocalExecutor
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.compiled.shapes import CanonicalShapes, Shape
from duetto.serve.runtime.equal_bits import warmup
from duetto.serve.runtime.equal_bits.probe import Probe
from duetto.serve.runtime.equal_bits.warmup import Warmup, compile_order, first_shapes

SIZES = {"max_num_seqs": 16, "max_prefill_tokens": 64, "max_model_len": 256, "page_size": 16}
MORE = SIZES | {"max_prefill_tokens": 128}  # two programs more
PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=2)
PROMPTS = [[5, 17, 200, 31, 8], list(range(20, 150)), [7], list(range(60, 90))] * 3
PATIENCE = 600.0


class Gate:
    """Holds the compilation of what comes later back until it opens; some shapes cannot be compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.broken, add = threading.Event(), set[str](), ProgramTable.add

        def later(programs: ProgramTable, shape: Shape) -> None:
            assert self.open.wait(PATIENCE)
            if str(shape) in self.broken:
                raise RuntimeError(f"no room to compile {shape}")
            add(programs, shape)

        monkeypatch.setattr(ProgramTable, "add", later)


@pytest.fixture
def gate(monkeypatch, early) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def cold(one_layer, gate) -> Iterator[LLM]:
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def warm(one_layer) -> Iterator[LLM]:
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    llm.engine.tables.reset_prefix_cache()
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in found]


def wait(llm: LLM) -> None:
    """Until an idle engine's warm-up is over."""
    end = time.monotonic() + PATIENCE
    while llm.engine.warmup is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def steps(llm: LLM) -> set[str]:
    return set(llm.report()["steps"])


def test_requests_are_answered_before_all_programs_are_compiled(cold, warm, gate):
    first = {"prefill[1,64]", "decode[8,1]"}
    assert set(cold.report()["compiled_at"]) == first == set(cold.report()["serving_since"])
    assert answers(cold) == answers(warm) and steps(cold) == first
    gate.open.set()
    wait(cold)
    assert cold.engine.classes == warm.engine.classes
    assert cold.report()["compiled_at"].keys() == warm.report()["compiled_at"].keys() > first
    assert cold.report()["serving_since"].keys() == set(map(str, warm.engine.classes.shapes))
    assert answers(cold) == answers(warm) and steps(cold) > first
    assert cold.engine.tables.occupancy == 0 and cold.report()["compilations"] == 0


def test_shapes_are_added_between_running_steps(cold, warm, gate):
    expected = answers(warm)
    gate.open.set()
    while cold.engine.warmup is not None:
        assert answers(cold) == expected
    assert cold.engine.classes == warm.engine.classes and answers(cold) == expected


@pytest.mark.full
def test_programs_that_cannot_be_compiled_are_left_out(cold, warm, gate, caplog):
    gate.broken.add("decode[16,1]")
    gate.open.set()
    wait(cold)
    lost = set(warm.engine.classes.shapes) - set(cold.engine.classes.shapes)
    assert set(map(str, lost)) == {"decode[16,1]"} and "decode[16,1] does not serve" in caplog.text
    assert answers(cold) == answers(warm)


@pytest.mark.parametrize("serving", [True, full(False)])
def test_a_device_that_fails_while_it_compares(cold, warm, gate, monkeypatch, serving):
    """However often it fails: no caller hears of it, and the first programs go on."""
    run, expected = LocalExecutor.run, answers(warm)

    def fails(executor: LocalExecutor, shape: Shape, *rest: Any) -> Any:
        if str(shape) not in ("prefill[1,64]", "decode[8,1]"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return run(executor, shape, *rest)

    monkeypatch.setattr(LocalExecutor, "run", fails)
    gate.open.set()
    while serving and cold.engine.warmup is not None:
        assert answers(cold) == expected
    wait(cold)
    monkeypatch.undo()
    assert set(map(str, cold.engine.classes.shapes)) == {"prefill[1,64]", "decode[8,1]"}
    assert answers(cold) == expected and cold.engine.tables.occupancy == 0


@pytest.mark.full
@pytest.mark.parametrize("broken", ["__init__", "does_prefill_match_decode"])
def test_programs_that_cannot_be_compared_are_left_out(one_layer, gate, warm, monkeypatch, caplog, broken):
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("nothing to read with")

    monkeypatch.setattr(Probe, broken, fails)
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        gate.open.set()
        wait(llm)
        assert "nothing to read with" in caplog.text
        assert answers(llm) == answers(warm) and llm.engine.tables.occupancy == 0


def test_an_interrupted_comparison_is_made_again(cold, warm, gate, monkeypatch):
    matches, interrupts = Probe.matches_canonical, ["a Ctrl-C"]

    def interrupted(probe: Probe, shape: Shape) -> bool:
        is_equal = matches(probe, shape)
        if interrupts and threading.current_thread() is threading.main_thread():
            interrupts.clear()
            raise KeyboardInterrupt
        return is_equal

    monkeypatch.setattr(Probe, "matches_canonical", interrupted)
    gate.open.set()
    with pytest.raises(KeyboardInterrupt):
        while cold.engine.warmup is not None:
            answers(cold)
    assert answers(cold) == answers(warm)
    wait(cold)
    assert cold.engine.tables.occupancy == 0 and cold.engine.classes == warm.engine.classes


def test_warm_up_goes_on_after_a_stop_token(cold, gate):
    """The step after a stop token is on its way already when its request ends."""
    (output,) = cold.generate([PROMPTS[0]], PARAMS, use_tqdm=False)
    stop = output.outputs[0].token_ids[4]
    cold.generate([PROMPTS[0]], replace(PARAMS, stop_token_ids=[stop]), use_tqdm=False)
    assert cold.engine.has_work
    gate.open.set()
    wait(cold)
    assert not cold.engine.has_work


@pytest.mark.full
def test_what_another_thread_compiles_meanwhile_is_compared_too(one_layer, warm, early, monkeypatch):
    """Of several threads one may take a shape, the largest, before the pages are counted that comparing
    takes."""
    prepare, add = Warmup._make_probe, ProgramTable.add
    taken, counted = threading.Event(), threading.Event()

    def late(warmup: Warmup) -> None:
        assert taken.wait(PATIENCE)
        prepare(warmup)
        counted.set()

    def slow(programs: ProgramTable, shape: Shape) -> None:
        taken.set()
        assert counted.wait(PATIENCE)
        add(programs, shape)

    monkeypatch.setattr(Warmup, "_make_probe", late)
    monkeypatch.setattr(ProgramTable, "add", slow)
    monkeypatch.setattr(warmup, "num_cores", lambda: 4)
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        wait(llm)
        assert llm.engine.classes == warm.engine.classes and answers(llm) == answers(warm)


def test_sleep_and_other_parameters_while_it_compares(one_layer, cold, warm, gate, monkeypatch):
    advance, end = cold.session.warm_up_once, time.monotonic() + PATIENCE
    with monkeypatch.context() as held:
        held.setattr(cold.session, "warm_up_once", lambda: False)  # its threads compile only
        gate.open.set()
        while not advance():  # until one shape is compared
            assert time.monotonic() < end
            time.sleep(0.01)
        cold.sleep(level=1)
        assert not advance()
        cold.wake_up()
    doubled = jax.tree.map(lambda x: x * 2, one_layer.params)
    cold.update_params(doubled)
    wait(cold)
    cold.update_params(one_layer.params)
    assert cold.engine.classes == warm.engine.classes and answers(cold) == answers(warm)


def test_a_closed_engine_compiles_nothing_more(one_layer, gate):
    with LLM.from_params(one_layer.config, one_layer.params, **MORE) as llm:
        programs: Any = llm.engine.programs
        missing = len(programs.missing)
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name.startswith("duetto-warmup"):
            thread.join(PATIENCE)
    assert missing > 2 and len(programs.steps) < 2 + missing


@pytest.mark.full
def test_jax_context_settings_disable_background_compilation(one_layer, early):
    with (
        jax.default_matmul_precision("float32"),
        LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm,
    ):
        programs: Any = llm.engine.programs
        assert llm.engine.warmup is None and not programs.missing


@pytest.fixture
def few_verifications(monkeypatch) -> None:
    """Engines compile the two narrowest of four verifications."""
    engine_shapes = start.engine_shapes
    monkeypatch.setattr(
        start, "engine_shapes", lambda *given: [s for s in engine_shapes(*given) if s.packed_tokens <= 16]
    )


@pytest.mark.usefixtures("few_verifications")
@pytest.mark.parametrize("broken", [full(set()), {"verify[16,4] of 16", "decode[16,1]"}])
def test_speculation_begins_once_its_steps_are_known(one_layer, gate, warm, broken):
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    gate.broken |= broken
    with LLM.from_params(one_layer.config, one_layer.params, speculative_config=ngram, **SIZES) as llm:
        assert answers(llm) == answers(warm) and llm.engine.speculation is None
        gate.open.set()
        wait(llm)
        classes, speculation = llm.engine.classes, llm.engine.speculation
        assert classes.verify and not broken & set(map(str, classes.shapes))
        assert speculation is not None and speculation.controller is not None
        timed = {(s.rows, 0) for s in classes.decode} | {(s.packed_tokens, 3) for s in classes.verify}
        assert set(speculation.controller.call_seconds) == timed
        assert answers(llm) == answers(warm)


@pytest.mark.full
def test_speculation_is_off_if_no_verification_compiles(one_layer, gate, warm, caplog):
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM.from_params(one_layer.config, one_layer.params, speculative_config=ngram, **SIZES) as llm:
        programs: Any = llm.engine.programs
        gate.broken |= {str(s) for s in programs.missing if s.phase == "verify"}
        gate.open.set()
        wait(llm)
        assert llm.engine.speculation is None and "no verification gives the bits of decode" in caplog.text
        assert answers(llm) == answers(warm)


def test_without_the_contract_all_shapes_are_used(one_layer, early):
    with LLM.from_params(one_layer.config, one_layer.params, reproducible=False, **SIZES) as llm:
        wait(llm)
        assert set(llm.engine.classes.shapes) == set(llm.engine.programs.steps)


# ------------------------------------------------------------ parts


def test_the_first_shapes_serve_everything():
    canonical = CanonicalShapes(Shape("prefill", 1, 64), Shape("decode", 8, 1))
    shapes = [Shape("prefill", 1, 128), Shape("prefill", 8, 32), Shape("decode", 1, 1), Shape("decode", 4, 1)]
    assert first_shapes([*shapes, *canonical], canonical) == canonical
    assert first_shapes([*shapes, Shape("decode", 8, 4)], canonical) == (shapes[0], shapes[3])


@pytest.mark.full
def test_warm_up_ends_while_requests_take_all_pages(one_layer, gate):
    """Requests that come one after the other, the longest as long as the pool, do not starve it: the last
    ones are preempted."""
    with LLM.from_params(one_layer.config, one_layer.params, max_batched_token_mem=256, **SIZES) as llm:
        gate.open.set()
        end = time.monotonic() + PATIENCE
        for i in itertools.count():
            assert time.monotonic() < end
            size = 250 if i % 5 == 0 else 90
            llm.engine.tables.reset_prefix_cache()
            llm.add_request([i % 300] * size, SamplingParams(temperature=0.0, max_tokens=5))
            for _ in range(4):
                llm.step()
            if llm.engine.warmup is None:
                break
        while llm.has_unfinished_requests():
            llm.step()


def test_the_largest_shapes_of_each_phase_are_compiled_first():
    small, large = Shape("prefill", 1, 64), Shape("prefill", 1, 128)
    narrow, wide = Shape("decode", 8, 1), Shape("decode", 16, 1)
    assert compile_order([small, narrow, large, wide]) == [wide, large, narrow, small]


@pytest.mark.parametrize("windows", [(None,), (None, 20), (20, 40)])
def test_borrowed_pages_are_free_ones_and_come_back(windows):
    tables = PageTables(windows, [8] * len(windows), 16, 16)
    one = tables.admit([[] for _ in windows], 40, 64)
    tables.advance_windows(one, 0, 40)
    before = [pool.num_free for pool in tables.pools]
    assert tables.has_free_pages(min(before)) and not tables.has_free_pages(min(before) + 1)
    with pytest.raises(KeyboardInterrupt), tables.borrow_pages(3) as pages:
        assert [len(numbers) for numbers in pages] == [3] * len(windows)
        assert not any(set(borrowed) & set(kept) for borrowed, kept in zip(pages, one, strict=True))
        raise KeyboardInterrupt
    assert [pool.num_free for pool in tables.pools] == before
