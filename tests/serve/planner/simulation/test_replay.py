"""A run of the real engine, replayed by the simulation step by step, which is told how long each call
took."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from cases.models import TINY as TWO
from cases.weights import drawn
from fakes.greedy import greedy_programs

from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs
from duetto.sampling.params import SamplingParams
from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request, RequestTimes
from duetto.serve.engine.startup.start import start_engine
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.simulation.engine_simulation import Simulation, make_prompt_ids
from duetto.serve.planner.simulation.step_times import StepCall
from duetto.serve.planner.workloads.traces import TraceEntry

TINY = replace(TWO, layers=TWO.layers[:1])
TICKS = 1.0 / 64  # seconds that everything takes a whole number of: sums are exact
Row = tuple[str, int, int]  # request, start and count


class Ticking:
    """A clock that goes on whenever it is looked at, by a number of ticks that varies."""

    def __init__(self):
        self.ticks, self.looks = 0, 0

    def __call__(self) -> float:
        self.looks += 1
        self.ticks += self.looks * 7 % 5
        return self.ticks * TICKS


@dataclass
class Run:
    """What is noted of a run: when each step began, its calls' rows and seconds, and of each request the
    tokens' number and how often it gave way."""

    begins: list[float] = field(default_factory=list)
    plans: list[list[tuple[str, list[Row]]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ended: list[tuple[str, int, int]] = field(default_factory=list)

    def noting(self, make_batch):
        """`make_batch` of an engine, which notes the rows of each call."""

        def noted(sizes, shape, rows):
            self.plans[-1].append((str(shape), [(w.request.id, w.start, w.count) for w in rows.values()]))
            return make_batch(sizes, shape, rows)

        return noted

    def note_ends(self, engine: Engine) -> None:
        self.ended += [(r.id, len(r.tokens), r.preemptions) for r in engine.take_ended()]


def workload() -> list[TraceEntry]:
    """Requests that arrive in waves; some share their first block, more than the pages hold at once."""
    lengths = [(40, 30), (3, 50), (70, 9), (25, 40), (90, 20), (5, 5), (33, 33), (64, 60)]
    return [
        TraceEntry(wave * 2.5 + i / 8, prompt, output, (1,) if i % 3 == 0 else ())
        for wave in range(3)
        for i, (prompt, output) in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Engine, EngineOptions]]:
    options = EngineOptions(
        max_num_seqs=4, page_size=16, max_model_len=160, max_prefill_tokens=64, max_batched_token_mem=320,
        reproducible=False, background_compilation=False,
    )  # fmt: skip
    with greedy_programs():
        engine = start_engine(TINY, drawn(decoder_spec(TINY)), options)
    yield engine, options
    engine.close()


def recorded(engine: Engine) -> Run:
    """A run of the workload by a clock of its own."""
    run, clock, coming = Run(), Ticking(), workload()
    engine.stats.now = clock
    engine.make_batch = run.noting(engine.make_batch)
    engine.stats.on_call = lambda shape, cached, seconds: run.seconds.append(seconds)
    count = 0
    while coming or engine.has_work:
        run.begins.append(clock())
        while coming and coming[0].arrival <= run.begins[-1]:
            entry, count = coming.pop(0), count + 1
            params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
            prompt = [token % TINY.vocab_size for token in make_prompt_ids(entry, -1 - count)]
            end = len(prompt) + entry.output_tokens
            own = RequestTimes(entry.arrival, now=clock)
            engine.submit(Request(str(count), prompt, params, 0, end, arrival=count, times=own))
        run.plans.append([])
        if engine.has_work:
            engine.step()
        run.note_ends(engine)
    return run


class Recorded:
    """Times of a run's calls, in the order in which they were made."""

    num_stages = 1

    def __init__(self, seconds: Iterable[float]):
        self._seconds = iter(seconds)

    def __call__(self, call: StepCall) -> Sequence[float]:
        return (next(self._seconds),)


def replayed(engine: Engine, options: EngineOptions, run: Run) -> Run:
    """The same workload in the simulation, whose steps begin when those of the run did."""
    found, params = Run(), shapes_from_specs(decoder_spec(TINY), "float32")
    own = Simulation(
        TINY, params, options, engine.sizes, Recorded(run.seconds), "cpu", classes=engine.classes
    )
    own.engine.make_batch = found.noting(own.engine.make_batch)
    coming = workload()
    for begin in run.begins:
        assert own.clock() <= begin, "a step took longer than in the run"
        own.clock.wait_until(begin)
        while coming and coming[0].arrival <= begin:
            own.engine.submit(own.make_request(coming.pop(0)))
        found.plans.append([])
        if own.engine.has_work:
            own.engine.step()
        found.note_ends(own.engine)
    return found


def test_a_recorded_run_is_replayed_step_by_step(real):
    engine, options = real
    run = recorded(engine)
    found = replayed(engine, options, run)
    assert found.plans == run.plans and found.ended == run.ended
    assert sum(preemptions for _, _, preemptions in run.ended) > 0
    assert len({plan[0][0] for plan in run.plans if plan}) > 2  # shapes
