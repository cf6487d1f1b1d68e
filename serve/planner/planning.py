"""Plan of an engine, before anything is loaded or run: its sizes, and what its programs must cost."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...checkpoints.huggingface import read_config
from ...cpu_kernels.library import library
from ...kvcache.shards import splits_experts
from ...kvcache.stages import cache_of, config_of, stages
from ...model.config import ModelConfig
from ...model.gpus import gpu_of
from ...model.pair import PairConfig, target_of
from ...model.sharding import Layout
from ...model.transformer import Decoder, decoder_spec
from ...model.tree import abstract
from ...model.weights.compress import form_spec
from ...model.weights.prepared import fuse_qkv, prepared
from ..engine.lora.writer import roomy
from ..engine.startup.cpu_kernels import kernels_refusal, with_kernels
from ..engine.startup.dtype import check_cache, compute_dtype
from ..engine.startup.folder import DEMO, read_shapes
from ..engine.startup.mesh import check_experts, layout_of, on_one, places, put
from ..engine.startup.origin import Origin, stored_form
from ..engine.startup.stages import with_head
from ..options.engine import EngineOptions
from ..runtime.compiled.compile import StepArguments, arguments_like, lower
from ..runtime.compiled.shapes import Shape, Sizes, decided, shapes_of
from ..runtime.compiled.sizing import choose_sizes
from ..runtime.pipeline.lowering import StageLowering
from ..runtime.pipeline.route import route
from ..runtime.steps.phases import TargetOnly
from .roofline.facts import ProgramFacts, facts
from .roofline.floor import Demand, demand, pools
from .roofline.presets import PRESETS
from .roofline.table import ShapeCost, floored
from .roofline.targets import Target, described, device_of
from .roofline.thunks import Thunks, compile_thunks

ONE = Layout()


@dataclass(frozen=True)
class EnginePlan:
    """An engine that is planned.

    name: of the model.
    context: tokens in the cache of each row.
    params: shapes with their places; by default those of the sizes in the option's quantization.
    without_kernels: why an engine on a CPU computes without CPU kernels.
    """

    name: str
    config: ModelConfig
    dtype: str
    options: EngineOptions
    target: Target
    sizes: Sizes
    context: int
    params: Decoder | None = None
    without_kernels: str = ""

    @property
    def cpu_kernels(self) -> str | None:
        """The instruction set of the CPU kernels, or None."""
        return library().isa if self.options.cpu_kernels else None

    @property
    def shapes(self) -> list[Shape]:
        platform, dtype = self.target.devices[0].platform, jnp.dtype(self.dtype)
        return shapes_of(self.options, self.sizes, self.config.layers, platform, dtype)


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
    check_cache(options, device_of(target))
    options = with_kernels(options, device_of(target), config, dtype, len(target.devices))
    stored = None if shape else folder
    chosen = compute_dtype(dtype, device_of(target), config, stored, options.cpu_kernels)
    chosen = "bfloat16" if chosen == "auto" else str(jnp.dtype(chosen))
    if shape:
        options.require_unstored("a shape has no checkpoint")
        weights = abstract(form_spec(config, options.quantization), jnp.dtype(chosen))
    else:
        weights = read_shapes(folder, chosen, options.quantization)
    options.check_stages(options.stations)
    target = on_devices(target, layout_of(options).size)
    params = abstract_params(config, chosen, target, weights, layout_on(options, target))
    if options.cpu_kernels:
        packed = prepared(params, options.batch_invariant_matmul, True, options.tied_head)
        options = decided(options, packed)
    without = kernels_refusal(options, device_of(target), config, chosen, len(target.devices))
    sizes = choose_sizes(PairConfig(config), options, params, target.memory)
    config = config.within(sizes.max_model_len)
    context = min(1024, sizes.max_model_len) if context is None else context
    if not 0 < context <= sizes.max_model_len:
        raise ValueError(f"context {context} is not allowed: 1 to max_model_len {sizes.max_model_len}")
    return EnginePlan(
        shape or model or "the demo model", config, chosen, options, target, sizes, context, params, without
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
    params = fuse_qkv(params) if plan.options.fuses_qkv else params
    options = plan.options
    params = prepared(params, options.batch_invariant_matmul, bool(options.cpu_kernels), options.tied_head)
    params = roomy(params, plan.config, plan.options)
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


def compile_and_read(
    plan: EnginePlan, shape: Shape, arguments: StepArguments
) -> list[tuple[jax.stages.Compiled, Thunks | None]]:
    """A shape's programs, one for each stage, and for a GPU how each is launched."""
    way, phases = route(arguments.params), TargetOnly(plan.config)
    with described(plan.target):
        if len(way) > 1:
            lowered = StageLowering(phases, arguments, plan.sizes, way).lower(shape)
        else:
            lowered = [lower(phases, shape, arguments, plan.sizes)]
        found = gpu_of(device_of(plan.target))
        options = found.options(shape.product_rows if plan.options.reproducible else 0) if found else None
        return [compile_thunks(own, options) if found else (own.compile(), None) for own in lowered]


def make_row(plan: EnginePlan, arguments: StepArguments, shape: Shape, compiled: bool = True) -> ShapeCost:
    """Cost of one shape for one of the target's devices, of a model that is not cut into stages."""
    made = facts_of(plan, arguments, shape)[0] if compiled else None
    return row_of(plan, arguments, range(plan.config.num_layers), shape, made)


def row_of(
    plan: EnginePlan, arguments: StepArguments, span: range, shape: Shape, made: ProgramFacts | None
) -> ShapeCost:
    """Cost of one shape for the layers of a stage, on each of its devices."""
    own = ShapeCost(shape, work(plan, arguments, span, shape), None, None, made)
    return floored(own, plan.target, plan.dtype)


def work(plan: EnginePlan, arguments: StepArguments, span: range, shape: Shape) -> Demand:
    """A stage's work for a shape, on each of its devices."""
    params, kept = target_of(arguments.params), plan.sizes.kv_cache_dtype
    own, config = replace(params, layers=params.layers[span.start : span.stop]), config_of(plan.config, span)
    last, context = span.stop == plan.config.num_layers, context_of(plan, shape)
    shards = plan.sizes.shards if splits_experts(params) else 1
    whole = demand(shape, config, plan.dtype, context, own, kept, samples=last, shards=shards)
    n = len(plan.target.devices) // (plan.sizes.shards * plan.options.pipeline_parallel_size)
    return Demand(whole.flops / n, whole.bytes / n)


def facts_of(plan: EnginePlan, arguments: StepArguments, shape: Shape) -> list[ProgramFacts]:
    """Return what XLA makes of a shape's programs, one for each stage, at the planned context."""
    context, found = context_of(plan, shape), compile_and_read(plan, shape, arguments)
    made = []
    for span, (compiled, thunks) in zip(stages(arguments.params), found, strict=True):
        layers, cache = config_of(plan.config, span).layers, cache_of(arguments.cache, span)
        read = pools(shape, layers, cache, context)
        made.append(replace(facts(compiled, read, steps=shape.tokens), thunks=thunks))
    return made


def context_of(plan: EnginePlan, shape: Shape) -> int:
    """Tokens in the cache of a shape's rows."""
    return 0 if shape.phase == "prefill" else plan.context


def main_shapes(shapes: list[Shape]) -> list[Shape]:
    """The largest prefill, of two the one of more rows, and the widest single step of decode."""
    prefill = max((s for s in shapes if s.phase == "prefill"), key=lambda s: (s.area, s.rows))
    return [prefill, max((s for s in shapes if s.phase == "decode" and s.tokens == 1), key=lambda s: s.rows)]
