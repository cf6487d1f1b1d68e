"""Plan of an engine, before anything is loaded or run: its sizes, and what its programs must cost."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...checkpoints.huggingface import read_config
from ...cpu_kernels.library import load_library
from ...kvcache.shards import has_split_experts
from ...kvcache.stages import pipeline_stages, stage_cache, stage_config
from ...model.config import ModelConfig
from ...model.draft_pair import PairConfig, target_params
from ...model.sharding import Layout
from ...model.transformer import Decoder, decoder_spec
from ...model.tree import shapes_from_specs
from ...model.weights.compression.compress import form_spec
from ...model.weights.device_forms import convert_to_device_forms
from ..engine.lora.writer import add_lora_if_enabled
from ..engine.startup.cpu_kernels import decide_cpu_kernels, explain_unused_cpu_kernels
from ..engine.startup.dtype import check_kv_cache_dtype, compute_dtype
from ..engine.startup.mesh import (
    check_expert_shardings,
    make_layout,
    param_shardings,
    place_params,
    single_device_shardings,
)
from ..engine.startup.model_folder import DEMO_FOLDER, choose_device_forms, read_param_shapes
from ..engine.startup.model_source import ModelSource, resolve_weight_options
from ..engine.startup.stage_shardings import with_last_stage_head
from ..options.engine import EngineOptions
from ..runtime.compiled.lowering import LocalLowering, StepArguments, make_abstract_arguments, xla_options
from ..runtime.compiled.shapes import Shape, Sizes, engine_shapes, resolve_cpu_options
from ..runtime.compiled.sizing import choose_sizes
from ..runtime.pipeline.route import make_route
from ..runtime.pipeline.stage_lowering import StageLowering
from ..runtime.steps.phases import TargetOnly
from .roofline.cost_table import ShapeCost, with_floor
from .roofline.floor import Demand, describe_pool_buffers, program_demand
from .roofline.presets import PRESETS
from .roofline.program_facts import ProgramFacts, join_facts, read_program_facts
from .roofline.targets import Target, first_device, target_lowering
from .roofline.thunks import ThunkCounts, compile_with_thunks

UNSPLIT_LAYOUT = Layout()


@dataclass(frozen=True)
class EnginePlan:
    """Plan of an engine.

    name: of the model.
    dtype: of the computation.
    context: tokens in the cache of each row.
    params: shapes with their shardings; by default those of the sizes in the option's quantization.
    no_cpu_kernels_reason: reason why an engine on a CPU computes without CPU kernels.
    """

    name: str
    config: ModelConfig
    dtype: str
    options: EngineOptions
    target: Target
    sizes: Sizes
    context: int
    params: Decoder | None = None
    no_cpu_kernels_reason: str = ""

    @property
    def cpu_kernel_isa(self) -> str | None:
        """Return the instruction set of the CPU kernels, or None."""
        return load_library().isa if self.options.cpu_kernels else None

    @property
    def shapes(self) -> list[Shape]:
        platform, dtype = self.target.devices[0].platform, jnp.dtype(self.dtype)
        return engine_shapes(self.options, self.sizes, self.config.layers, platform, dtype)


def plan_engine(
    model: str | None,
    shape: str | None,
    dtype: str,
    options: EngineOptions,
    target: Target,
    context: int | None,
    **source_options: Any,
) -> EnginePlan:
    """Choose an engine's sizes as a start would. `source_options` are options of `ModelSource.resolve_names`.

    Raises ValueError if the sizes do not fit, or the target cannot hold them.
    """
    options = options.with_device_load(target.memory)
    folder = DEMO_FOLDER if shape else ModelSource.resolve_names(model, **source_options).model_folder
    if not shape:
        options = resolve_weight_options(folder, options)
    config = PRESETS[shape] if shape else read_config(folder)
    check_kv_cache_dtype(options, first_device(target))
    options = decide_cpu_kernels(options, first_device(target), config, dtype, len(target.devices))
    checkpoint_folder = None if shape else folder
    computed_dtype = compute_dtype(
        dtype, first_device(target), config, checkpoint_folder, options.cpu_kernels
    )
    computed_dtype = "bfloat16" if computed_dtype == "auto" else str(jnp.dtype(computed_dtype))
    if shape:
        options.refuse_checkpoint_quantization("a shape has no checkpoint")
        weights = shapes_from_specs(form_spec(config, options.quantization), jnp.dtype(computed_dtype))
    else:
        weights = read_param_shapes(folder, computed_dtype, options.quantization)
    options.check_stages(options.num_device_groups)
    target = limit_devices(target, make_layout(options).num_devices)
    params = abstract_params(config, computed_dtype, target, weights, target_layout(options, target))
    if options.cpu_kernels:
        prepared_params = convert_to_device_forms(params, choose_device_forms(options))
        options = resolve_cpu_options(options, prepared_params)
    no_cpu_kernels_reason = explain_unused_cpu_kernels(
        options, first_device(target), config, computed_dtype, len(target.devices)
    )
    sizes = choose_sizes(PairConfig(config), options, params, target.memory)
    config = config.drop_unreached_limits(sizes.max_model_len)
    context = min(1024, sizes.max_model_len) if context is None else context
    if not 0 < context <= sizes.max_model_len:
        raise ValueError(f"context {context} is not allowed: 1 to max_model_len {sizes.max_model_len}")
    return EnginePlan(
        shape or model or "the demo model",
        config,
        computed_dtype,
        options,
        target,
        sizes,
        context,
        params,
        no_cpu_kernels_reason,
    )


def limit_devices(target: Target, count: int) -> Target:
    """Return the target with its first `count` devices, or with all of them if `count` is 1. Raises
    ValueError if it has fewer."""
    if count > len(target.devices):
        raise ValueError(
            f"{count} devices are not allowed (tensor_parallel_size times pipeline_parallel_size times "
            f"data_parallel_size): {target.name} has {len(target.devices)}"
        )
    return target if count == 1 else replace(target, devices=target.devices[:count])


def target_layout(options: EngineOptions, target: Target) -> Layout:
    """Return the options' layout. If they state none, split every layer over all devices of the target."""
    layout = make_layout(options)
    return replace(layout, tensor=len(target.devices)) if layout.num_devices == 1 else layout


def abstract_arguments(plan: EnginePlan) -> StepArguments:
    """Return parameters, cache and slots as shapes without numbers. On several devices they are sharded by
    RULES."""
    params, layout = plan.params, target_layout(plan.options, plan.target)
    if params is None:
        weights = shapes_from_specs(form_spec(plan.config, plan.options.quantization), jnp.dtype(plan.dtype))
        params = abstract_params(plan.config, plan.dtype, plan.target, weights, layout)
    check_expert_shardings(params)
    params = convert_to_device_forms(params, choose_device_forms(plan.options))
    params = add_lora_if_enabled(params, plan.config, plan.options)
    return make_abstract_arguments(PairConfig(plan.config), params, plan.sizes)


def abstract_params(
    config: ModelConfig,
    dtype: Any,
    target: Target,
    weights: Decoder | None = None,
    layout: Layout = UNSPLIT_LAYOUT,
) -> Decoder:
    """Return parameters as shapes without numbers on a target's devices. The default weights are plain
    arrays."""
    weights = shapes_from_specs(decoder_spec(config), jnp.dtype(dtype)) if weights is None else weights
    shardings = param_shardings(config, layout, devices=target.devices) or single_device_shardings(
        config, target.devices[0]
    )
    return with_last_stage_head(place_params(shardings, weights))


def compile_stages(
    plan: EnginePlan, shape: Shape, arguments: StepArguments
) -> list[list[tuple[jax.stages.Compiled, ThunkCounts | None]]]:
    """Compile the programs of a shape; returns the programs of each stage. For a GPU return also how each
    program is launched."""
    stage_route, phases = make_route(arguments.params), TargetOnly(plan.config)
    with target_lowering(plan.target):
        if len(stage_route) > 1:
            stages = StageLowering(phases, arguments, plan.sizes, stage_route).lower(shape)
            lowered_stages = [[program] for program in stages]
        else:
            lowered_stages = [LocalLowering(phases, arguments, plan.sizes).lower_all(shape)]
        options = xla_options(arguments, shape.product_rows if plan.options.reproducible else 0)
        return [
            [
                (program.compile(), None) if options is None else compile_with_thunks(program, options)
                for program in lowered
            ]
            for lowered in lowered_stages
        ]


def analyze_shape_cost(
    plan: EnginePlan, arguments: StepArguments, shape: Shape, compiles: bool = True
) -> ShapeCost:
    """Return the cost of one shape on one of the target's devices. The model is not cut into stages."""
    program_facts = compile_program_facts(plan, arguments, shape)[0] if compiles else None
    return stage_cost(plan, arguments, range(plan.config.num_layers), shape, program_facts)


def stage_cost(
    plan: EnginePlan, arguments: StepArguments, span: range, shape: Shape, program_facts: ProgramFacts | None
) -> ShapeCost:
    """Return the cost of one shape for the layers of a stage, on each of its devices."""
    cost = ShapeCost(shape, stage_demand(plan, arguments, span, shape), None, None, program_facts)
    return with_floor(cost, plan.target, plan.dtype)


def stage_demand(plan: EnginePlan, arguments: StepArguments, span: range, shape: Shape) -> Demand:
    """Return a stage's work for a shape, on each of its devices."""
    params, cache_dtype = target_params(arguments.params), plan.sizes.kv_cache_dtype
    span_params, config = (
        replace(params, layers=params.layers[span.start : span.stop]),
        stage_config(plan.config, span),
    )
    is_last, context = span.stop == plan.config.num_layers, shape_context(plan, shape)
    shards = plan.sizes.shards if has_split_experts(params) else 1
    total = program_demand(
        shape, config, plan.dtype, context, span_params, cache_dtype, samples=is_last, shards=shards
    )
    n = len(plan.target.devices) // (plan.sizes.shards * plan.options.pipeline_parallel_size)
    return Demand(total.flops / n, total.bytes / n)


def compile_program_facts(plan: EnginePlan, arguments: StepArguments, shape: Shape) -> list[ProgramFacts]:
    """Compile a shape and return the facts of its programs, for each stage, at the planned context."""
    context, stages = shape_context(plan, shape), compile_stages(plan, shape, arguments)
    all_facts = []
    for span, programs in zip(pipeline_stages(arguments.params), stages, strict=True):
        layers, cache = stage_config(plan.config, span).layers, stage_cache(arguments.cache, span)
        pool_buffers = describe_pool_buffers(shape, layers, cache, context)
        facts = [
            replace(read_program_facts(compiled, pool_buffers, default_trips=shape.tokens), thunks=thunks)
            for compiled, thunks in programs
        ]
        all_facts.append(join_facts(facts))
    return all_facts


def shape_context(plan: EnginePlan, shape: Shape) -> int:
    """Return the tokens in the cache of each of a shape's rows; 0 for a prefill."""
    return 0 if shape.phase == "prefill" else plan.context


def main_shapes(shapes: list[Shape]) -> list[Shape]:
    """Return the largest prefill and the widest single step of decode. Of two prefills of one area, choose
    the one of more rows."""
    prefill = max((s for s in shapes if s.phase == "prefill"), key=lambda s: (s.area, s.rows))
    return [prefill, max((s for s in shapes if s.phase == "decode" and s.tokens == 1), key=lambda s: s.rows)]
