"""The plan of each stage of an engine: its memory and what its programs must cost. An engine without a
pipeline is one stage."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...kvcache.pages import page_bytes
from ...kvcache.quantised import kept_as
from ...kvcache.stages import attending, cache_of, feeding, is_apart, params_of, stages
from ...model.pair import PairConfig, target_of
from ...model.sharding import device_bytes
from ...model.transformer import decoder_spec
from ...model.tree import nbytes, paths
from ...model.weights.prepared import lanes_of
from ..options.checks import GIB
from ..runtime.compiled.compile import Programs, StepArguments
from ..runtime.compiled.shapes import Shape, doublings
from ..runtime.compiled.sizing import scratch_bytes, widened_bytes
from ..runtime.pipeline.route import HALVES
from ..runtime.steps.phases import TargetOnly
from .planning import EnginePlan, facts_of, row_of, work
from .roofline.bubbles import cycle, drained, endless
from .roofline.halves import Cluster, Decode, Sides
from .roofline.measured import measure
from .roofline.table import ShapeCost
from .roofline.targets import NVME

LIMIT = 0.05  # seconds between a row's tokens, where attention and feed-forward layers apart are compared


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device.

    temporaries: of the largest program, compiled or else estimated.
    limit: the device's memory, if known.
    peak: measured while the programs ran.
    """

    weights: int
    cache: int
    slots: int
    temporaries: int
    limit: int | None
    peak: int | None = None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.slots + self.temporaries


@dataclass(frozen=True)
class StagePlan:
    """A stage on its group of devices.

    name: its layers, or the half that it computes of all.
    devices: number of its devices.
    memory: of each device.
    rows: costs of each shape; none for halves.
    """

    name: str
    layers: range
    devices: int
    memory: MemoryPlan
    rows: list[ShapeCost]


def stage_plans(plan: EnginePlan, arguments: StepArguments, compiled: Iterable[Shape]) -> list[StagePlan]:
    """The stages of a plan; costs of the shapes in `compiled` have what XLA made of them."""
    params, slots = target_of(arguments.params), device_bytes(arguments.slots)
    if is_apart(params):
        layers, cache = range(plan.config.num_layers), device_bytes(arguments.cache)
        held = (attending(params), cache, slots), (feeding(params), 0, 0)
        each = zip(HALVES, held, strict=True)
        return [StagePlan(name, layers, 1, memory_of(plan, *own, []), []) for name, own in each]
    spans = stages(params)
    made = {shape: facts_of(plan, arguments, shape) for shape in compiled}
    found = []
    for i, span in enumerate(spans):
        own = params_of(params, span) if len(spans) > 1 else params
        rows = [row_of(plan, arguments, span, s, made[s][i] if s in made else None) for s in plan.shapes]
        cache = device_bytes(cache_of(arguments.cache, span))
        memory = memory_of(plan, own, cache, slots if span is spans[-1] else 0, rows)
        name, n = f"{span.start}-{span.stop - 1}", len(plan.target.devices) // len(spans)
        found.append(StagePlan(name, span, n, memory, rows))
    return found


def memory_of(plan: EnginePlan, own: Any, cache: int, slots: int, rows: Sequence[ShapeCost]) -> MemoryPlan:
    """Memory of a device with its own parameters."""
    estimate = scratch_bytes(PairConfig(plan.config), plan.options, plan.dtype)
    estimate += widened_bytes(own, plan.dtype)
    temporaries = max((row.facts.temporaries for row in rows if row.facts), default=estimate)
    return MemoryPlan(device_bytes(own), cache, slots, temporaries, plan.target.memory)


def measured(plan: EnginePlan, arguments: StepArguments, stage: StagePlan) -> StagePlan:
    """The one stage of a plan with seconds and memory of its compiled programs, run here on equal
    parameters."""
    shapes = [row.shape for row in stage.rows if row.facts]
    if not shapes:
        return stage
    phases, reproducible = TargetOnly(plan.config), plan.options.reproducible
    programs = Programs(phases, arguments.params, plan.sizes, shapes, reproducible=reproducible)
    longest = max((s.tokens for s in shapes if s.phase != "prefill"), default=0)
    found = measure(programs, arguments, min(plan.context, plan.sizes.max_model_len - longest))
    timed = [replace(row, seconds=found.seconds.get(row.shape)) for row in stage.rows]
    return replace(stage, memory=replace(stage.memory, peak=found.peak), rows=timed)


# ---------------------------------------------------------------- micro-batches


class MicroBatches(NamedTuple):
    """Decode of all seats in micro-batches.

    rows: of each micro-batch.
    stages: seconds that each stage takes for one micro-batch.
    links: seconds that one micro-batch is on the links, where feed-forward layers lie apart.
    bubbles: share of the stages' time without work, in an engine that does not drain.
    drained: the same in one that drains; None where a step visits stages again.
    seconds: least time between a request's tokens.
    rate: most tokens a second.
    """

    micro_batches: int
    rows: int
    stages: list[float]
    links: float
    bubbles: float
    drained: float | None
    seconds: float
    rate: float


def micro_batches(plan: EnginePlan, arguments: StepArguments) -> list[MicroBatches]:
    """Decode in some numbers of micro-batches; none for one stage, and where the peaks are not known."""
    params, seats = target_of(arguments.params), plan.sizes.max_num_seqs
    spans, apart = stages(params), is_apart(params)
    if plan.target.peaks is None or not (apart or len(spans) > 1):
        return []
    if apart:
        cluster, sides = cluster_of(plan), sides_of(plan, arguments)
        turns = {m: cluster.turns(sides, 1, seats // m) for m in range(1, 5) if seats >= m}
        return [micro(m, seats // m, [*own], links, None) for m, (*own, links) in turns.items()]
    at_most, n = (plan.target.peaks.flops(plan.dtype), plan.target.peaks.bandwidth), len(spans)
    counts = [m for m in doublings(1, 2 * n) if seats % m == 0 and seats >= m]
    shapes = {m: Shape("decode", seats // m, 1) for m in counts}
    floors = {
        m: [work(plan, arguments, span, own).floor(*at_most) for span in spans] for m, own in shapes.items()
    }
    return [micro(m, seats // m, floors[m], 0.0, drained(n, m)) for m in counts]


def micro(count: int, rows: int, own: list[float], links: float, drained: float | None) -> MicroBatches:
    every = cycle([*own, links], count)
    return MicroBatches(
        count, rows, own, links, endless(own, count, links), drained, count * every, rows / every
    )


# ---------------------------------------------------------------- feed-forward layers apart


def sides_of(plan: EnginePlan, arguments: StepArguments) -> Sides:
    numbers = sum(math.prod(own.shape) for own in paths(decoder_spec(plan.config)).values())
    key = jnp.dtype(plan.dtype).itemsize if plan.sizes.kv_cache_dtype == "auto" else 1
    return Sides.of(plan.config, nbytes(arguments.params) / numbers, key)


def cluster_of(plan: EnginePlan) -> Cluster:
    assert plan.target.peaks is not None
    return Cluster(plan.target.peaks, len(plan.target.devices), plan.context, LIMIT)


def compared(plan: EnginePlan, arguments: StepArguments) -> dict[str, Decode | None]:
    """The most that the plan's devices decode with feed-forward layers apart, and if all attend; None where
    that does not fit."""
    if plan.target.peaks is None or not is_apart(arguments.params):
        return {}
    cluster, sides = cluster_of(plan), sides_of(plan, arguments)
    return {"apart": cluster.apart(sides, 1), "together": cluster.together(sides)}


# ---------------------------------------------------------------- KV offload


@dataclass(frozen=True)
class TierPlan:
    """A tier of KV offload.

    tokens: that it holds.
    page_bytes: of a page of all layers.
    fetch, compute: least seconds in which a page is fetched, and in which its tokens are computed; None where
    a rate is not known.
    """

    name: str
    tokens: int
    page_bytes: int
    fetch: float | None
    compute: float | None

    @property
    def gain(self) -> float | None:
        """Seconds of computing a page over those of fetching it."""
        return self.compute / self.fetch if self.compute and self.fetch else None


def planned_tiers(plan: EnginePlan, rows: list[ShapeCost]) -> list[TierPlan]:
    """The tiers that the options ask for."""
    layers, W = plan.config.within(plan.sizes.max_model_len).layers, plan.options.page_size
    kept, peaks = kept_as(plan.sizes.kv_cache_dtype, jnp.dtype(plan.dtype)), plan.target.peaks
    size = sum(page_bytes(layers, W, kept, lanes_of(plan.target.devices, plan.options.data_parallel_size)))
    floors = [row.floor / row.shape.area for row in rows if row.floor and row.shape.phase == "prefill"]
    compute = W * min(floors) if floors else None
    over = size / peaks.host if peaks and peaks.host else None
    read = max(size / NVME, over or 0.0)
    spaces = {"host memory": (plan.options.swap_space, over), "disk": (plan.options.kv_disk_space, read)}
    return [
        TierPlan(name, int(space * GIB) // size * W, size, fetch, compute)
        for name, (space, fetch) in spaces.items()
        if space and plan.options.has_tiers
    ]
