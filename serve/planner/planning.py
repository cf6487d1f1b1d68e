"""What `duetto plan` plans: an engine's sizes, its memory, and what its programs must cost, before anything
is loaded or run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...checkpoints.huggingface import read_config
from ...kvcache.pages import page_bytes
from ...kvcache.quantised import kept_as
from ...kvcache.shards import splits_experts
from ...model.config import ModelConfig
from ...model.pair import PairConfig, target_of
from ...model.sharding import Layout, device_bytes
from ...model.transformer import Decoder, decoder_spec
from ...model.tree import abstract
from ...model.weights.compress import form_spec
from ...model.weights.prepared import prepared
from ..engine.lora.writer import roomy
from ..engine.startup.dtype import compute_dtype
from ..engine.startup.folder import DEMO, read_shapes
from ..engine.startup.mesh import check_experts, layout_of, on_one, places, put
from ..engine.startup.origin import Origin, stored_form
from ..engine.startup.stages import with_head
from ..options.checks import GIB
from ..options.engine import EngineOptions
from ..runtime.compiled.compile import Programs, StepArguments, arguments_like, lower
from ..runtime.compiled.shapes import Shape, Sizes, can_share, table
from ..runtime.compiled.sizing import choose_sizes, scratch_bytes, widened_bytes
from ..runtime.steps.phases import TargetOnly
from .roofline.facts import ProgramFacts, facts
from .roofline.floor import Demand, demand, pools
from .roofline.measured import measure
from .roofline.presets import PRESETS
from .roofline.table import ShapeCost, floored
from .roofline.targets import NVME, Target, described, is_gpu
from .roofline.thunks import Thunks, compile_thunks

ONE = Layout()


@dataclass(frozen=True)
class EnginePlan:
    """What is planned: a model's sizes, an engine's options and shapes, the devices, and tokens in the cache
    of each row."""

    name: str
    config: ModelConfig
    dtype: str
    options: EngineOptions
    target: Target
    sizes: Sizes
    context: int
    params: Decoder | None = (
        None  # where they lie, without numbers; by default those of the sizes in the option's quantization
    )

    @property
    def shapes(self) -> list[Shape]:
        platform = self.target.devices[0].platform
        return table(self.options, self.sizes, can_share(self.config.layers), platform)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device: what an engine holds, and temporaries of its largest program (compiled, or else
    estimated).

    `peak` is what running it took, where that was measured.
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


def plan_job(
    model: str | None,
    shape: str | None,
    dtype: str,
    options: EngineOptions,
    target: Target,
    context: int | None,
    **where: Any,
) -> EnginePlan:
    """Chooses an engine's sizes as a start would; `where` are options of `Origin.of`.

    Raises ValueError where they do not fit, or the target cannot hold them.
    """
    options = options.on(target.memory)
    folder = DEMO if shape else Origin.of(model, **where).model
    if not shape:
        options = replace(options, quantization=stored_form(folder, options.quantization))
    config = PRESETS[shape] if shape else read_config(folder)
    chosen = compute_dtype(dtype, target.devices[0], config, None if shape else folder)
    chosen = "bfloat16" if chosen == "auto" else str(jnp.dtype(chosen))
    if shape:
        options.require_unstored("a shape has no checkpoint")
        weights = abstract(form_spec(config, options.quantization), jnp.dtype(chosen))
    else:
        weights = read_shapes(folder, chosen, options.quantization)
    options.check_stages(options.stations)
    target = on_devices(target, layout_of(options).size)
    params = abstract_params(config, chosen, target, weights, layout_on(options, target))
    sizes = choose_sizes(PairConfig(config), options, params, target.memory)
    config = config.within(sizes.max_model_len)
    context = min(1024, sizes.max_model_len) if context is None else context
    if not 0 < context <= sizes.max_model_len:
        raise ValueError(f"context {context} is not allowed: 1 to max_model_len {sizes.max_model_len}")
    return EnginePlan(
        shape or model or "the demo model", config, chosen, options, target, sizes, context, params
    )


def on_devices(target: Target, n: int) -> Target:
    """The target with its first n devices; 1 is all of them. Raises ValueError where there are fewer."""
    if n > len(target.devices):
        raise ValueError(
            f"{n} devices are not allowed (tensor_parallel_size times pipeline_parallel_size times "
            f"data_parallel_size): {target.name} has {len(target.devices)}"
        )
    return target if n == 1 else replace(target, devices=target.devices[:n])


def layout_on(options: EngineOptions, target: Target) -> Layout:
    """The options' layout; where they ask for none, every layer is split over all of the target's devices."""
    layout = layout_of(options)
    return replace(layout, tensor=len(target.devices)) if layout.size == 1 else layout


def abstract_arguments(plan: EnginePlan) -> StepArguments:
    """Parameters, cache and slots without numbers, placed on the target: split by RULES where it has several
    devices."""
    params, layout = plan.params, layout_on(plan.options, plan.target)
    if params is None:
        weights = abstract(form_spec(plan.config, plan.options.quantization), jnp.dtype(plan.dtype))
        params = abstract_params(plan.config, plan.dtype, plan.target, weights, layout)
    check_experts(params)
    params = roomy(prepared(params, plan.options.batch_invariant_matmul), plan.config, plan.options)
    return arguments_like(PairConfig(plan.config), params, plan.sizes)


def abstract_params(
    config: ModelConfig,
    dtype: Any,
    target: Target,
    weights: Decoder | None = None,
    layout: Layout = ONE,
) -> Decoder:
    """Parameters without numbers on a target's devices, by default arrays."""
    weights = abstract(decoder_spec(config), jnp.dtype(dtype)) if weights is None else weights
    where = places(config, layout, devices=target.devices) or on_one(config, target.devices[0])
    return with_head(put(where, weights))


def compile_for(plan: EnginePlan, shape: Shape, arguments: StepArguments) -> jax.stages.Compiled:
    """One program, ahead of time, for the plan's target."""
    return compile_and_read(plan, shape, arguments)[0]


def compile_and_read(
    plan: EnginePlan, shape: Shape, arguments: StepArguments
) -> tuple[jax.stages.Compiled, Thunks | None]:
    """The same, and for a GPU how the program is launched."""
    with described(plan.target):
        lowered = lower(TargetOnly(plan.config), shape, arguments, plan.sizes)
        return compile_thunks(lowered) if is_gpu(plan.target) else (lowered.compile(), None)


def make_rows(plan: EnginePlan, arguments: StepArguments, compiled: Iterable[Shape]) -> list[ShapeCost]:
    """A row for each shape of the table; those of `compiled` with what XLA made of them."""
    chosen = set(compiled)
    return [make_row(plan, arguments, shape, shape in chosen) for shape in plan.shapes]


def make_row(plan: EnginePlan, arguments: StepArguments, shape: Shape, compiled: bool = True) -> ShapeCost:
    """One shape's figures, for one of the target's devices."""
    n = len(plan.target.devices) // plan.sizes.shards  # of a shard
    context = 0 if shape.phase == "prefill" else plan.context
    params, kept = target_of(arguments.params), plan.sizes.kv_cache_dtype
    shards = plan.sizes.shards if splits_experts(params) else 1
    whole = demand(shape, plan.config, plan.dtype, context, params, kept, shards=shards)
    found = facts_of(plan, arguments, shape, context) if compiled else None
    return floored(
        ShapeCost(shape, Demand(whole.flops / n, whole.bytes / n), None, None, found), plan.target, plan.dtype
    )


def facts_of(plan: EnginePlan, arguments: StepArguments, shape: Shape, context: int) -> ProgramFacts:
    """What XLA makes of a shape whose rows have so many tokens in the cache."""
    read = pools(shape, plan.config.layers, arguments.cache, context)
    compiled, thunks = compile_and_read(plan, shape, arguments)
    return replace(facts(compiled, read, steps=shape.tokens), thunks=thunks)


def main_shapes(shapes: list[Shape]) -> list[Shape]:
    """The largest prefill, of two the one of more rows, and the widest single step of decode."""
    prefill = max((s for s in shapes if s.phase == "prefill"), key=lambda s: (s.area, s.rows))
    return [prefill, max((s for s in shapes if s.phase == "decode" and s.tokens == 1), key=lambda s: s.rows)]


def memory_of(plan: EnginePlan, arguments: StepArguments, rows: list[ShapeCost]) -> MemoryPlan:
    found = [row.facts.temporaries for row in rows if row.facts]
    estimate = scratch_bytes(PairConfig(plan.config), plan.options, plan.dtype)
    estimate += widened_bytes(arguments.params, plan.dtype)
    return MemoryPlan(
        weights=device_bytes(arguments.params),
        cache=device_bytes(arguments.cache),
        slots=device_bytes(arguments.slots),
        temporaries=max(found) if found else estimate,
        limit=plan.target.memory,
    )


def measured(
    plan: EnginePlan, arguments: StepArguments, memory: MemoryPlan, rows: list[ShapeCost]
) -> tuple[MemoryPlan, list[ShapeCost]]:
    """The plan with the seconds and the memory of its compiled programs, run here on parameters that are all
    alike."""
    shapes = [row.shape for row in rows if row.facts]
    if not shapes:
        return memory, rows
    programs = Programs(TargetOnly(plan.config), arguments.params, plan.sizes, shapes)
    longest = max((s.tokens for s in shapes if s.phase != "prefill"), default=0)
    found = measure(programs, arguments, min(plan.context, plan.sizes.max_model_len - longest))
    timed = [replace(row, seconds=found.seconds.get(row.shape)) for row in rows]
    return replace(memory, peak=found.peak), timed


@dataclass(frozen=True)
class TierPlan:
    """A tier of pages: tokens that it holds, bytes of a page of all layers, and the least seconds in which
    one is fetched and in which its tokens are computed; None where a rate is not known."""

    name: str
    tokens: int
    page_bytes: int
    fetch: float | None
    compute: float | None

    @property
    def gain(self) -> float | None:
        """How many times a page is computed while it is fetched once."""
        return self.compute / self.fetch if self.compute and self.fetch else None


def planned_tiers(plan: EnginePlan, rows: list[ShapeCost]) -> list[TierPlan]:
    """The tiers that the options ask for."""
    layers, W = plan.config.within(plan.sizes.max_model_len).layers, plan.options.page_size
    kept, peaks = kept_as(plan.sizes.kv_cache_dtype, jnp.dtype(plan.dtype)), plan.target.peaks
    size = sum(page_bytes(layers, W, kept))
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
