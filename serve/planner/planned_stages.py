"""What `duetto plan` says of a pipeline: each stage's memory and floors, what XLA made of its programs, and
what micro-batches do to its bubbles."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ...kvcache.stages import cache_of, config_of, devices, params_of, stages
from ...model.pair import PairConfig, target_of
from ...model.sharding import device_bytes
from ..runtime.compiled.compile import StepArguments
from ..runtime.compiled.shapes import Shape, doublings
from ..runtime.compiled.sizing import scratch_bytes, widened_bytes
from ..runtime.pipeline.lowering import StageLowering
from ..runtime.steps.phases import TargetOnly
from .planning import EnginePlan, MemoryPlan
from .roofline.bubbles import cycle, drained, endless
from .roofline.facts import facts
from .roofline.floor import Demand, demand, pools
from .roofline.table import ShapeCost, floored, render_fact, render_table
from .roofline.targets import described


@dataclass(frozen=True)
class StagePlan:
    """A stage's layers, its number of devices, the memory of each, and a row for each shape."""

    layers: range
    devices: int
    memory: MemoryPlan
    rows: list[ShapeCost]


class Micro(NamedTuple):
    """Decode in micro-batches of some rows: the share of idle time in an engine that does not drain and in
    one that does, the least seconds between a request's tokens, and the most tokens a second."""

    micro_batches: int
    rows: int
    bubbles: float
    drained: float
    seconds: float
    rate: float


def stage_plans(plan: EnginePlan, arguments: StepArguments, compiled: Iterable[Shape]) -> list[StagePlan]:
    """The stages of a plan whose parameters lie in some; those of `compiled` with what XLA made of them."""
    spans, chosen = stages(arguments.params), list(compiled)
    made = {shape: made_of(plan, arguments, spans, shape) for shape in chosen}
    return [
        stage_plan(plan, arguments, spans, i, {s: found[i] for s, found in made.items()})
        for i in range(len(spans))
    ]


def made_of(plan: EnginePlan, arguments: StepArguments, spans: Sequence[range], shape: Shape) -> list[Any]:
    """What XLA made of a shape's programs, whose rows have as many tokens in the cache as planned."""
    context = context_of(plan, shape)
    own = ((config_of(plan.config, span).layers, cache_of(arguments.cache, span)) for span in spans)
    read = [pools(shape, layers, cache, context) for layers, cache in own]
    with described(plan.target):
        lowered = StageLowering(TargetOnly(plan.config), arguments, plan.sizes, spans).lower(shape)
        each = zip(lowered, read, strict=True)
        return [facts(program.compile(), keys, steps=shape.tokens) for program, keys in each]


def stage_plan(
    plan: EnginePlan, arguments: StepArguments, spans: Sequence[range], i: int, made: dict[Shape, Any]
) -> StagePlan:
    own, is_last = params_of(target_of(arguments.params), spans[i]), i == len(spans) - 1
    rows = [
        floored(
            ShapeCost(shape, work(plan, arguments, spans[i], shape), None, None, made.get(shape)),
            plan.target,
            plan.dtype,
        )
        for shape in plan.shapes
    ]
    estimate = scratch_bytes(PairConfig(plan.config), plan.options, plan.dtype)
    estimate += widened_bytes(own, plan.dtype)
    memory = MemoryPlan(
        weights=device_bytes(own),
        cache=device_bytes(cache_of(arguments.cache, spans[i])),
        slots=device_bytes(arguments.slots) if is_last else 0,
        temporaries=max([found.temporaries for found in made.values()], default=estimate),
        limit=plan.target.memory,
    )
    return StagePlan(spans[i], len(devices(own)), memory, rows)


def work(plan: EnginePlan, arguments: StepArguments, span: range, shape: Shape) -> Demand:
    """A stage's share of a shape, on each of its devices."""
    whole, last = target_of(arguments.params), span.stop == plan.config.num_layers
    params = replace(whole, layers=whole.layers[span.start : span.stop])
    context = context_of(plan, shape)
    kept, config = plan.sizes.kv_cache_dtype, config_of(plan.config, span)
    found = demand(shape, config, plan.dtype, context, params, kept, samples=last)
    n = len(devices(params_of(whole, span)))
    return Demand(found.flops / n, found.bytes / n)


def context_of(plan: EnginePlan, shape: Shape) -> int:
    """Tokens in the cache of a shape's rows."""
    return 0 if shape.phase == "prefill" else plan.context


def micro_batches(plan: EnginePlan, arguments: StepArguments) -> list[Micro]:
    """Decode of all seats in 1, 2, 4, ... micro-batches; nothing where the peaks are not known."""
    if plan.target.peaks is None:
        return []
    spans, seats = stages(arguments.params), plan.sizes.max_num_seqs
    return [
        micro(plan, arguments, spans, count)
        for count in doublings(1, 2 * len(spans))
        if seats % count == 0 and seats >= count
    ]


def micro(plan: EnginePlan, arguments: StepArguments, spans: Sequence[range], count: int) -> Micro:
    rows, peaks = plan.sizes.max_num_seqs // count, plan.target.peaks
    assert peaks is not None
    at_most = peaks.flops(plan.dtype), peaks.bandwidth
    shape = Shape("decode", rows, 1)
    seconds = [work(plan, arguments, span, shape).floor(*at_most) for span in spans]
    every = cycle(seconds, count)
    bubbles = endless(seconds, count), drained(len(spans), count)
    return Micro(count, rows, *bubbles, count * every, rows / every)


# ---------------------------------------------------------------- text


def render(plan: EnginePlan, arguments: StepArguments, found: list[StagePlan]) -> list[str]:
    """The stages and their micro-batches as text."""
    return [render_memory(plan, found), *render_programs(plan, found), *render_micro(plan, arguments)]


def render_memory(plan: EnginePlan, found: list[StagePlan]) -> str:
    heads = "weights", "cache", "slots", "temporaries", "total"
    lines = [f"{'stage':<7}{'layers':>9}{'devices':>9}" + "".join(f"{name:>13}" for name in heads) + "  MiB"]
    for i, stage in enumerate(found):
        memory = stage.memory
        sizes = memory.weights, memory.cache, memory.slots, memory.temporaries, memory.total
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
        cells = "".join(f"{size / 2**20:>13.1f}" for size in sizes)
        lines.append(f"{i:<7}{layers:>9}{stage.devices:>9}{cells}")
    if plan.target.memory is not None:
        allowed = plan.target.memory * plan.options.gpu_memory_utilization
        verdict = "fit" if all(stage.memory.total <= allowed for stage in found) else "DO NOT FIT"
        lines.append(f"{verdict} in {allowed / 2**20:.1f} MiB, the share of each device's memory")
    return "\n".join(lines)


def render_programs(plan: EnginePlan, found: list[StagePlan]) -> list[str]:
    link = plan.target.peaks.link if plan.target.peaks else 0.0
    parts = []
    for i, stage in enumerate(found):
        lines = [f"stage {i}", *render_table(stage.rows)]
        lines += [
            f"{row.shape}, compiled:\n{render_fact(row.facts, link)}" for row in stage.rows if row.facts
        ]
        parts.append("\n".join(lines))
    return parts


def render_micro(plan: EnginePlan, arguments: StepArguments) -> list[str]:
    found = micro_batches(plan, arguments)
    if not found:
        return []
    lines = [
        f"decode of {plan.sizes.max_num_seqs} rows with {plan.context} tokens in the cache, from the floors:",
        f"{'micro-batches':<15}{'rows':>6}{'bubbles':>9}{'drained':>9}{'ms a token':>12}{'tokens/s':>11}",
    ]
    for m in found:
        cells = f"{m.bubbles:>9.0%}{m.drained:>9.0%}{m.seconds * 1e3:>12.3f}{m.rate:>11.0f}"
        lines.append(f"{m.micro_batches:<15}{m.rows:>6}{cells}")
    return ["\n".join(lines)]


def as_json(plan: EnginePlan, arguments: StepArguments, found: list[StagePlan]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "stages": [
            {
                "layers": [stage.layers.start, stage.layers.stop - 1],
                "devices": stage.devices,
                "memory": asdict(stage.memory),
                "programs": [{**asdict(row), "shape": str(row.shape)} for row in stage.rows],
            }
            for stage in found
        ],
        "micro_batches": [m._asdict() for m in micro_batches(plan, arguments)],
    }
