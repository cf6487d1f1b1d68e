"""Makes docs/tuning.md: python -m benchmarks.tuning (some minutes; all of it is computed, nothing measured).

Tables of closed formulas are made anew by the tests, those of simulations only here: the page says what they
were made from.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from duetto.model.sharding import Layout
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.bubbles import drained_bubbles, steady_bubbles
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import target_facts
from duetto.serve.planner.simulation import (
    candidates,
    engine_simulation,
    estimate,
    fleet,
    offload,
    search,
    step_times,
)
from duetto.serve.planner.simulation.candidates import Candidate, SearchSpace
from duetto.serve.planner.simulation.memory_fit import PlannedModel
from duetto.serve.planner.simulation.search import (
    CandidateResult,
    SearchGoal,
    estimate_candidate,
    estimated_device_rate,
    improve_knobs,
    simulate_until_capacity,
)
from duetto.serve.planner.simulation.step_times import STATED_EFFICIENCY, RooflineTimes, StepCall
from duetto.serve.planner.workloads import slo_stats
from duetto.serve.planner.workloads.slo_stats import SLO
from duetto.serve.planner.workloads.traces import draw_requests
from duetto.serve.planner.workloads.workload import Workload
from duetto.serve.runtime.compiled.shapes import Shape

PAGE = Path(__file__).resolve().parents[1] / "docs" / "tuning.md"
MODELS = "0.6b", "8b", "30b-a3b"
BATCHES, CONTEXT = (1, 8, 32, 64), 1024
PIPELINES = 2, 4, 8, 16
# as long as Azure's conversations
LOAD = Workload(list(draw_requests(2000, rate=5.0, prompt=1000, output=250)))
AIM = SearchGoal(SLO(ttft=1.0, tpot=0.05), share=0.99)
SPLITS, SPLIT_LIMITS = (1, 3), (0.05, 0.012)  # engines that decode for one that does not; seconds
H200 = target_facts("h200").peaks


def table(head: str, rows: Iterator[list[str]]) -> str:
    names = head.split(" | ")
    lines = [f"| {head} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def space(shape: str, target: str, quantization: str | None = None) -> SearchSpace:
    job = PlannedModel(shape, PRESETS[shape], target_facts(target))
    return SearchSpace(job, EngineOptions(max_model_len=8192, quantization=quantization), STATED_EFFICIENCY)


# ---------------------------------------------------------------- closed formulas


def batches(shape: str) -> Iterator[list[str]]:
    """Decode of some rows on one H200."""
    own = space(shape, "h200")
    model = RooflineTimes(own.demands(own.base_options), H200)
    for rows in BATCHES:
        call = StepCall(Shape("decode", rows, 1), rows, rows, rows * CONTEXT)
        (seconds,) = model(call)
        whole = range(PRESETS[shape].num_layers)
        bound = model.demands.stage_demand(call.shape, CONTEXT, whole, 1).bottleneck(
            H200.flops16, H200.bandwidth
        )
        yield [shape, str(rows), f"{seconds * 1e3:.2f}", f"{rows / seconds:.0f}", bound]


def bubbles() -> Iterator[list[str]]:
    """Decode of 64 rows of the 8B shape in stages: in training's order, and in an engine that does not
    drain."""
    own = space("8b", "h200")
    for stages in PIPELINES:
        model = RooflineTimes(own.demands(own.base_options), H200, Layout(stages=stages))
        row = [str(stages)]
        for count in (1, stages, 2 * stages):
            rows = max(1, 64 // count)
            call = StepCall(Shape("decode", rows, 1), rows, rows, rows * CONTEXT)
            row.append(f"{drained_bubbles(stages, count):.0%}, {steady_bubbles(model(call), count):.0%}")
        yield row


def chunks() -> Iterator[list[str]]:
    """What a chunk of a prompt beside 64 rows of decode costs them, 8B on one H200."""
    own = space("8b", "h200")
    model = RooflineTimes(own.demands(own.base_options), H200)
    (alone,) = model(StepCall(Shape("decode", 64, 1), 64, 64, 64 * CONTEXT))
    for tokens in (256, 512, 1024, 2048, 4096, 8192):
        (chunk,) = model(StepCall(Shape("prefill", 1, tokens), 1, tokens, 0))
        yield [str(tokens), f"{chunk * 1e3:.1f}", f"{(alone + chunk) * 1e3:.1f}", f"{tokens / chunk:.0f}"]


# ---------------------------------------------------------------- simulations


def lone() -> Iterator[list[str]]:
    """One user: the layouts of one device and of eight with the least time between tokens."""
    for shape in MODELS:
        for target in ("h200", "8xh200"):
            own = space(shape, target)
            call = StepCall(Shape("decode", 1, 1), 1, 1, CONTEXT)
            best = min(own.layout_candidates(), key=lambda c: sum(c.roofline(call)))
            seconds = sum(best.roofline(call))
            yield [shape, target, layout_of(best), f"{seconds * 1e3:.2f}", f"{1 / seconds:.0f}"]


def layout_of(own: Candidate) -> str:
    return candidates.layout_name(own.options, {})


def many() -> Iterator[list[str]]:
    """Many users: the engine that bears most on one device and on eight, as the simulation has it."""
    for shape in MODELS:
        for target in ("h200", "8xh200"):
            own = space(shape, target)
            found = sorted(
                (estimate_candidate(c, LOAD, AIM) for c in own.layout_candidates()),
                key=estimated_device_rate,
                reverse=True,
            )
            best = improve_knobs(own, found[0], LOAD, AIM, lambda: True)
            simulate_until_capacity(
                best, LOAD, AIM, best.steady.rate / search.LOAD_RATIO, deadline=1.0, clock=lambda: 0.0
            )
            yield [shape, target, *told(best)]
            print(f"{shape} on {target}: {best.candidate.name}", flush=True)


def split() -> Iterator[list[str]]:
    """Prefill and decode mixed in engines, or apart in ratios: what eight devices bear of the 8B shape."""
    own = space("8b", "8xh200").try_candidate()
    assert own is not None
    for tpot in SPLIT_LIMITS:
        aim = SearchGoal(SLO(ttft=1.0, tpot=tpot), share=0.99)
        for candidate in (
            own,
            *(c for c in own.disaggregated_candidates() if c.decoders_per_prefill in SPLITS),
        ):
            answer = estimate_candidate(candidate, LOAD, aim)
            simulate_until_capacity(
                answer, LOAD, aim, answer.steady.rate / search.LOAD_RATIO, deadline=1.0, clock=lambda: 0.0
            )
            engines = f"1 + {candidate.decoders_per_prefill}" if candidate.decoders_per_prefill else "mixed"
            _, rate, _, spans, _ = told(answer)
            limit = f"{tpot * 1e3:g}"
            yield [limit, f"{candidate.replicas} x ({engines})", rate, spans, answer.steady.bound]
            print(f"{limit} ms: {candidate.name}", flush=True)


def told(best: CandidateResult) -> list[str]:
    point = best.best_point(AIM.share)
    if point is None:
        return [best.candidate.name, "-", "-", "-", best.steady.bound]
    own, o = best.candidate, point.outcome
    spans = f"{o['ttft']['p99'] * 1e3:.0f}", f"{o['tpot']['p99'] * 1e3:.1f}"
    rate = f"{point.rate * own.replicas:.1f}"
    tokens = f"{point.rate * LOAD.output / own.num_devices:.0f}"
    return [f"{own.replicas} x ({own.name})", rate, tokens, ", ".join(spans), best.steady.bound]


# ---------------------------------------------------------------- the page

CLOSED: dict[str, tuple[str, Callable[[], Iterator[list[str]]]]] = {
    "batches": (
        "model | rows | ms a step | tokens/s | bound",
        lambda: (row for shape in MODELS for row in batches(shape)),
    ),
    "bubbles": ("stages | 1 micro-batch | as many as stages | twice as many", bubbles),
    "chunks": ("tokens of the chunk | its ms | ms of the step | prefill tokens/s", chunks),
    "lone": ("model | target | layout | ms a token | tokens/s", lone),
}
SIMULATED: dict[str, tuple[str, Callable[[], Iterator[list[str]]]]] = {
    "many": (
        "model | target | engines | requests/s | tokens/s a device | p99 of TTFT, TPOT in ms | bound",
        many,
    ),
    "split": (
        "limit of TPOT, ms | engines | requests/s | p99 of TTFT, TPOT in ms | bound",
        split,
    ),
}
MADE_OF = (
    estimate,
    fleet,
    offload,
    engine_simulation,
    search,
    slo_stats,
    step_times,
    candidates,
)


def stamp() -> str:
    """A digest of what the simulated tables were made from: the room's code that decides them, and this."""
    files = [Path(str(module.__file__)) for module in MADE_OF] + [Path(__file__)]
    text = "\0".join(file.read_text() for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def filled(page: str, name: str, text: str) -> str:
    """The page with a table between its marks."""
    begin, end = f"<!-- tuning: {name} -->\n", "\n<!-- end -->"
    before, _, rest = page.partition(begin)
    assert rest, f"{PAGE} has no place for {name}"
    return before + begin + text + end + rest.partition(end)[2]


def main() -> None:
    made = {name: table(head, rows()) for name, (head, rows) in (CLOSED | SIMULATED).items()}
    page = PAGE.read_text()
    for name, text in (made | {"made from": f"Simulated by the code of {stamp()}."}).items():
        page = filled(page, name, text)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
