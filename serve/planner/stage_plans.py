"""The plan of each stage of an engine: its memory and what its programs must cost. An engine without a
pipeline is one stage."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...kvcache.pages import page_bytes
from ...kvcache.quantised import choose_cache_format
from ...kvcache.stages import (
    ffn_params_by_layer,
    has_separate_ffn,
    params_without_ffn,
    pipeline_stages,
    stage_cache,
    stage_params,
)
from ...model.draft_pair import PairConfig, target_params
from ...model.sharding import device_bytes
from ...model.transformer import decoder_spec
from ...model.tree import leaves_by_path, tree_bytes
from ...model.weights.device_forms import device_lanes
from ..options.checks import GIB
from ..runtime.compiled.local_executor import LocalExecutor
from ..runtime.compiled.lowering import LocalLowering, StepArguments
from ..runtime.compiled.program_table import ProgramTable
from ..runtime.compiled.shapes import Shape, doublings
from ..runtime.compiled.sizing import dequantised_bytes, max_scratch_bytes
from ..runtime.pipeline.route import LAYER_HALVES
from ..runtime.steps.phases import TargetOnly
from .engine_plan import EnginePlan, compile_program_facts, stage_cost, stage_demand
from .roofline.bubbles import drained_bubbles, pipeline_step_seconds, steady_bubbles
from .roofline.cost_table import ShapeCost
from .roofline.ffn_disaggregation import Cluster, Decode, ModelHalves
from .roofline.program_times import measure_programs
from .roofline.targets import NVME

MAX_TOKEN_SECONDS = 0.05  # seconds between a row's tokens, in the comparison of layouts


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device.

    weights, cache, slots: of the arrays.
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

    name: its layers, or "attention" or "ffn" if it computes one half of all.
    layers: range of its layers.
    devices: number of its devices.
    memory: of each device.
    rows: costs of each shape; empty for halves.
    """

    name: str
    layers: range
    devices: int
    memory: MemoryPlan
    rows: list[ShapeCost]


def plan_stages(
    plan: EnginePlan, arguments: StepArguments, shapes_to_compile: Iterable[Shape]
) -> list[StagePlan]:
    """Plan each stage. Shapes in `shapes_to_compile` are compiled, and their costs have the facts of the
    programs."""
    params, slots = target_params(arguments.params), device_bytes(arguments.slots)
    if has_separate_ffn(params):
        layers, cache = range(plan.config.num_layers), device_bytes(arguments.cache)
        halves = (params_without_ffn(params), cache, slots), (ffn_params_by_layer(params), 0, 0)
        named_halves = zip(LAYER_HALVES, halves, strict=True)
        return [
            StagePlan(name, layers, 1, plan_memory(plan, *span_params, []), [])
            for name, span_params in named_halves
        ]
    spans = pipeline_stages(params)
    facts_by_shape = {shape: compile_program_facts(plan, arguments, shape) for shape in shapes_to_compile}
    plans = []
    for i, span in enumerate(spans):
        span_params = stage_params(params, span) if len(spans) > 1 else params
        rows = [
            stage_cost(plan, arguments, span, s, facts_by_shape[s][i] if s in facts_by_shape else None)
            for s in plan.shapes
        ]
        cache = device_bytes(stage_cache(arguments.cache, span))
        memory = plan_memory(plan, span_params, cache, slots if span is spans[-1] else 0, rows)
        name, n = f"{span.start}-{span.stop - 1}", len(plan.target.devices) // len(spans)
        plans.append(StagePlan(name, span, n, memory, rows))
    return plans


def plan_memory(
    plan: EnginePlan, params: Any, cache: int, slots: int, rows: Sequence[ShapeCost]
) -> MemoryPlan:
    """Return the memory plan of a device that holds these parameters, and `cache` and `slots` bytes."""
    estimate = max_scratch_bytes(PairConfig(plan.config), plan.options, plan.dtype)
    estimate += dequantised_bytes(params, plan.dtype)
    temporaries = max((row.facts.temporaries for row in rows if row.facts), default=estimate)
    return MemoryPlan(device_bytes(params), cache, slots, temporaries, plan.target.memory)


def measure_stage_programs(plan: EnginePlan, arguments: StepArguments, stage: StagePlan) -> StagePlan:
    """Run a stage's compiled programs on this machine, and add their seconds and peak memory. The plan has no
    other stage; all parameters are one small number."""
    shapes = [row.shape for row in stage.rows if row.facts]
    if not shapes:
        return stage
    lowering = LocalLowering.from_params(TargetOnly(plan.config), arguments.params, plan.sizes)
    executor = LocalExecutor(ProgramTable(lowering, shapes, reproducible=plan.options.reproducible))
    longest = max((s.tokens for s in shapes if s.phase != "prefill"), default=0)
    measurement = measure_programs(executor, arguments, min(plan.context, plan.sizes.max_model_len - longest))
    timed_rows = [replace(row, seconds=measurement.seconds.get(row.shape)) for row in stage.rows]
    return replace(stage, memory=replace(stage.memory, peak=measurement.peak), rows=timed_rows)


# ---------------------------------------------------------------- micro-batches


class MicroBatchPlan(NamedTuple):
    """Decode of all slots in micro-batches.

    micro_batches: number of micro-batches.
    rows: of each micro-batch.
    stages: seconds that each stage takes for one micro-batch.
    links: seconds that one micro-batch is on the links, if feed-forward layers have devices of their own.
    bubbles: share of the stages' time without work, in an engine that does not drain.
    drained: that share in an engine that drains; None if a step visits stages again.
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


def plan_micro_batches(plan: EnginePlan, arguments: StepArguments) -> list[MicroBatchPlan]:
    """Plan decode in several numbers of micro-batches. Return none for a single stage, and if the peaks are
    unknown."""
    params, num_slots = target_params(arguments.params), plan.sizes.max_num_seqs
    spans, is_split = pipeline_stages(params), has_separate_ffn(params)
    if plan.target.peaks is None or not (is_split or len(spans) > 1):
        return []
    if is_split:
        cluster, halves = cluster_from_plan(plan), model_halves(plan, arguments)
        seconds_by_count = {
            m: cluster.micro_batch_seconds(halves, 1, num_slots // m) for m in range(1, 5) if num_slots >= m
        }
        return [
            make_micro_batch_plan(m, num_slots // m, stage_seconds, links, None)
            for m, (*stage_seconds, links) in seconds_by_count.items()
        ]
    peak_rates, n = (plan.target.peaks.flops(plan.dtype), plan.target.peaks.bandwidth), len(spans)
    counts = [m for m in doublings(1, 2 * n) if num_slots % m == 0 and num_slots >= m]
    shapes = {m: Shape("decode", num_slots // m, 1) for m in counts}
    floors = {
        m: [stage_demand(plan, arguments, span, shape).floor_seconds(*peak_rates) for span in spans]
        for m, shape in shapes.items()
    }
    return [make_micro_batch_plan(m, num_slots // m, floors[m], 0.0, drained_bubbles(n, m)) for m in counts]


def make_micro_batch_plan(
    count: int, rows: int, stage_seconds: list[float], link_seconds: float, drained_share: float | None
) -> MicroBatchPlan:
    """Combine the seconds of the stages and links for one micro-batch of `rows` rows."""
    step_seconds = pipeline_step_seconds([*stage_seconds, link_seconds], count)
    return MicroBatchPlan(
        count,
        rows,
        stage_seconds,
        link_seconds,
        steady_bubbles(stage_seconds, count, link_seconds),
        drained_share,
        count * step_seconds,
        rows / step_seconds,
    )


# ---------------------------------------------------------------- feed-forward layers apart


def model_halves(plan: EnginePlan, arguments: StepArguments) -> ModelHalves:
    """Cut the plan's model into attention and feed-forward layers, with the bytes of its weights and keys."""
    numbers = sum(math.prod(spec.shape) for spec in leaves_by_path(decoder_spec(plan.config)).values())
    key = jnp.dtype(plan.dtype).itemsize if plan.sizes.kv_cache_dtype == "auto" else 1
    return ModelHalves.from_config(plan.config, tree_bytes(arguments.params) / numbers, key)


def cluster_from_plan(plan: EnginePlan) -> Cluster:
    """Return the plan's devices as a cluster."""
    assert plan.target.peaks is not None
    return Cluster(plan.target.peaks, len(plan.target.devices), plan.context, MAX_TOKEN_SECONDS)


def compare_ffn_layouts(plan: EnginePlan, arguments: StepArguments) -> dict[str, Decode | None]:
    """Return decode with feed-forward layers on devices of their own ("apart"), and with every device
    attending ("together"). A layout that does not fit is None."""
    if plan.target.peaks is None or not has_separate_ffn(arguments.params):
        return {}
    cluster, halves = cluster_from_plan(plan), model_halves(plan, arguments)
    return {
        "apart": cluster.best_disaggregated_decode(halves, 1),
        "together": cluster.best_colocated_decode(halves),
    }


# ---------------------------------------------------------------- KV offload


@dataclass(frozen=True)
class TierPlan:
    """A tier of KV offload.

    tokens: capacity, in tokens.
    page_bytes: bytes of a page of all layers.
    fetch, compute: least seconds to fetch a page, and to compute its tokens; None if a rate is unknown.
    """

    name: str
    tokens: int
    page_bytes: int
    fetch: float | None
    compute: float | None

    @property
    def fetch_speedup(self) -> float | None:
        """Return the seconds to compute a page over those to fetch it; None if one is unknown."""
        return self.compute / self.fetch if self.compute and self.fetch else None


def plan_tiers(plan: EnginePlan, rows: list[ShapeCost]) -> list[TierPlan]:
    """Plan the tiers that the options enable."""
    layers, W = plan.config.drop_unreached_limits(plan.sizes.max_model_len).layers, plan.options.page_size
    cache_format, peaks = (
        choose_cache_format(plan.sizes.kv_cache_dtype, jnp.dtype(plan.dtype)),
        plan.target.peaks,
    )
    size = sum(
        page_bytes(
            layers, W, cache_format, device_lanes(plan.target.devices, plan.options.data_parallel_size)
        )
    )
    floors = [row.floor / row.shape.area for row in rows if row.floor and row.shape.phase == "prefill"]
    compute = W * min(floors) if floors else None
    host_seconds = size / peaks.host if peaks and peaks.host else None
    disk_seconds = max(size / NVME, host_seconds or 0.0)
    spaces = {
        "host memory": (plan.options.swap_space, host_seconds),
        "disk": (plan.options.kv_disk_space, disk_seconds),
    }
    return [
        TierPlan(name, int(space * GIB) // size * W, size, fetch, compute)
        for name, (space, fetch) in spaces.items()
        if space and plan.options.has_tiers
    ]
