"""Start of an engine: parameters are placed and prepared, programs compiled and warmed up."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from ....kvcache.stages import (
    ffn_params_by_layer,
    has_separate_ffn,
    num_device_groups,
    params_without_ffn,
    pipeline_stages,
    stage_params,
    tree_devices,
)
from ....model.config import Experts, ModelConfig
from ....model.draft_pair import EngineParams, PairConfig, target_params
from ....model.transformer import Decoder, ObserveOptions
from ....model.tree import find_non_finite, leaves_by_path
from ....model.weights.compression.compress import convert_weight_form
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.device_forms import DeviceForms, convert_to_device_forms
from ....model.weights.quant import LOST_CODES, find_lost_codes
from ....refusals import ensure
from ....sampling.custom_processors import trace_processors
from ...host import progress
from ...host.devices import memory_limit
from ...host.process import keep_freed_memory, use_huge_pages
from ...host.streams import warn_once
from ...kv.offload.remote_kv import RemoteKV
from ...kv.offload.tier_setup import OnRealm, check_offload_options, start_mover
from ...options.checks import round_up
from ...options.engine import EngineOptions
from ...runtime.compiled import executable_cache, jaxcache
from ...runtime.compiled.encoder_input import encoder_keys
from ...runtime.compiled.local_executor import LocalExecutor
from ...runtime.compiled.lowering import LocalLowering, StepArguments, prompt_keys
from ...runtime.compiled.program_table import ProgramTable
from ...runtime.compiled.shapes import (
    CanonicalShapes,
    Shape,
    Sizes,
    engine_shapes,
    min_row_tokens,
    resolve_cpu_options,
)
from ...runtime.compiled.sizing import choose_sizes
from ...runtime.equal_bits.classes import (
    ShapeClasses,
    classes_key,
    load_or_probe_classes,
    measure_step_seconds,
)
from ...runtime.equal_bits.warmup import Warmup, WarmupGoal, first_shapes
from ...runtime.executor import Executor
from ...runtime.multihost.executor import compile_in_group, make_group_executor
from ...runtime.multihost.rendezvous import any_across_ranks, current_group
from ...runtime.pipeline.executor import PipelineExecutor
from ...runtime.pipeline.lowering import PipelineLowering
from ...runtime.steps.phases import Phases
from ..core.engine import Engine
from ..core.scheduler_output import SchedulerConfig
from ..core.speculation import Speculation
from ..lora.writer import add_lora_if_enabled
from ..speculation.controller import Controller
from ..speculation.drafter import make_host_drafter
from ..speculation.speculator_weights import check_recurrent_states, read_speculator
from .cpu_kernels import build_kernels_if_requested, explain_unused_cpu_kernels
from .dtype import check_kv_cache_dtype
from .kernel_checks import KernelChecks, check_kernels, failed_kernel_names, require_no_hang
from .mesh import check_expert_shardings, make_layout, shard_params
from .model_folder import choose_device_forms
from .stage_shardings import with_last_stage_head


def start_engine(
    config: ModelConfig,
    params: Decoder,
    options: EngineOptions,
    remote_kv: RemoteKV | None = None,
    on_realm: OnRealm | None = None,
) -> Engine:
    """Size, compile and warm up an engine for parameters that are on their device. Raises TypeError for other
    parameters.

    remote_kv: prefill engine that computes prompts for this one.
    on_realm: called with the realm of the pages if the engine sends pages to other engines.
    """
    if options.has_tiers:
        check_offload_options(options)
    with progress.progress_enabled(options.use_tqdm_on_load):
        engine = build_warm_engine(config, params, options)
        if options.has_tiers or remote_kv is not None:
            engine.attach_mover(start_mover(options, engine.programs, engine.all_params, remote_kv, on_realm))
    jaxcache.store_checksums()
    return engine


def build_warm_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    """Return an engine without tiers that can serve: all programs are ready, or a warm-up compiles the
    rest."""
    device, params, options, cpu_kernels_reason = adapt_to_device(config, params, options)
    num_groups = num_device_groups(params)
    options.check_stages(num_groups)
    params = add_lora_if_enabled(params, config, options)
    speculator = read_speculator(options.speculation, config, params)
    pair, all_params = PairConfig(config, speculator.config), speculator.pair_with(params)
    use_huge_pages(all_params)
    check_recurrent_states(pair, options.speculation, num_groups)
    if config.encoder is not None:
        check_encoder_options(options, num_groups, drafts_on_device=speculator.params is not None)
    sizes = choose_sizes(pair, options, all_params, memory_limit(device))
    processors = trace_processors(options.logits_processors, config.vocab_size, sizes.max_model_len)
    sizes = replace(sizes, hidden=config.hidden_size if speculator.is_head else 0, processors=processors)
    shapes = engine_shapes(options, sizes, pair.layers, device.platform, params.embed.dtype)
    canonical = CanonicalShapes.choose(device.platform, options, sizes)
    observe = choose_observed_values(config, options)
    reached = pair.drop_unreached_limits(sizes.max_model_len)
    phases = speculator.make_phases(reached, options.speculation, observe)
    early_shapes = first_shapes(shapes, canonical) if may_serve_early(options, all_params) else shapes
    others = encoder_keys(config.encoder) + (prompt_keys(shapes) if must_compile_first(options) else [])
    kernels = check_kernels(config, params, sizes)
    require_no_hang(kernels)
    keys, first_keys, refused = [*shapes, *others], [*early_shapes, *others], gather_refused_kernels(kernels)
    programs = compile_programs(phases, all_params, sizes, keys, first_keys, refused, options.reproducible)
    local = LocalExecutor(programs)
    arguments = local.fresh_arguments(all_params)
    goal = WarmupGoal(canonical, options.reproducible, timed_depths(options))
    scheduler_config = make_scheduler_config(options, sizes, shapes, pair.prefill_alignment, num_groups)
    make_engine = partial(
        Engine,
        scheduler_config=scheduler_config,
        prefix_caching=options.enable_prefix_caching,
        kernels=kernels,
        cpu_kernels_reason=cpu_kernels_reason,
    )
    if set(early_shapes) < set(shapes) and not are_programs_stored(programs, all_params, goal):
        classes = ShapeClasses.from_shapes(early_shapes, same_bits=not options.reproducible)
        record_key = classes_key(programs, all_params, canonical) if goal.reproducible else None
        make_late = partial(make_speculation_or_warn, options)
        warmup = Warmup(local, shapes, classes, goal, make_late, record_key)
        return make_engine(local, classes, arguments, warmup=warmup)
    classes, arguments = load_or_probe_classes(local, arguments, canonical, options.reproducible)
    seconds = None
    if goal.depths and classes.verify:
        seconds, arguments = measure_step_seconds(local, arguments, canonical, classes, goal.depths)
    speculation = make_speculation(options, classes, seconds)
    executor = make_serving_executor(local, arguments)
    return make_engine(executor, classes, arguments, speculation=speculation)


def adapt_to_device(
    config: ModelConfig, params: Decoder, options: EngineOptions
) -> tuple[Any, Decoder, EngineOptions, str]:
    """Return the first device, the parameters and options adapted to it, and the reason of
    `adapt_options_to_kernels`. Raises ValueError for options that the device does not allow."""
    params = check_param_placement(params)
    device = next(iter(params.embed.sharding.addressable_devices))
    options = options.with_device_load(memory_limit(device))
    options.refuse_checkpoint_quantization("these are parameters")
    check_kv_cache_dtype(options, device)
    build_kernels_if_requested(options, device.platform)
    params = prepare_engine_params(config, params, options)
    options, cpu_kernels_reason = adapt_options_to_kernels(options, device, config, params)
    if device.platform == "cpu":
        keep_freed_memory()
    return device, params, options, cpu_kernels_reason


def prepare_engine_params(config: ModelConfig, params: Decoder, options: EngineOptions) -> Decoder:
    """Return the parameters on the options' devices, in the forms that steps multiply by."""
    params = shard_params(config, params, make_layout(options))
    params = convert_weight_form(params, options.quantization, params.embed.dtype)
    check_expert_shardings(params)
    # `load_folder` has fused what it read. Parameters that a caller gives keep their projections apart.
    params = convert_to_device_forms(params, replace(choose_device_forms(options), fuse_qkv=False))
    served = DeviceForms.from_params(params).activations
    ensure(
        served == options.activations,
        f"activations={options.activations!r} is not allowed: the parameters are prepared for {served!r}",
    )
    return params


def check_encoder_options(options: EngineOptions, num_groups: int, drafts_on_device: bool) -> None:
    """Raise ValueError for an option that an engine whose model has an encoder cannot have."""
    refused = {
        "pipeline_parallel_size or experimental_ffn_devices": num_groups > 1,
        "data_parallel_size": options.data_parallel_size > 1,
        "nnodes": options.nnodes > 1,
        "a speculative_config with a model or heads": drafts_on_device,
        "kv_role": options.kv_role is not None,
        "audit_log": options.audit_log is not None,
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(f"{' and '.join(names)} is not allowed: the model has an encoder")


def choose_observed_values(config: ModelConfig, options: EngineOptions) -> ObserveOptions | None:
    """Return the values inside the model that steps report, or None. Raises ValueError for values it
    lacks."""
    if not options.is_observing:
        return None
    layers, experts = tuple(options.hidden_state_layers or ()), options.enable_return_routed_experts
    wrong = [n for n in layers if n > config.num_layers]
    if wrong:
        raise ValueError(f"hidden_state_layers {wrong[0]} is not allowed: 0 to {config.num_layers}")
    if experts and not any(isinstance(kind.ffn, Experts) for kind in config.layers):
        raise ValueError("enable_return_routed_experts is not allowed: the model has no experts")
    return ObserveOptions(experts, layers)


def adapt_options_to_kernels(
    options: EngineOptions, device: Any, config: ModelConfig, params: Decoder
) -> tuple[EngineOptions, str]:
    """Return the options adapted to `cpu_kernels`, and the reason why a CPU uses none, or not the best ones.

    `params` are prepared.
    """
    is_asked, isa = options.cpu_kernels, kernel_isa(params)
    options = resolve_cpu_options(options, params) if is_asked else options
    reason = explain_unused_cpu_kernels(
        options, device, config, params.embed.dtype, len(tree_devices(params))
    )
    if is_asked:
        none = "cpu_kernels has no effect: none of the weights is one that CPU kernels multiply"
        details = "; ".join(filter(None, (isa, reason)))
        progress.write_progress_line(f"products by CPU kernels ({details})" if isa else none)
    return options, reason


def gather_refused_kernels(kernels: KernelChecks) -> tuple[str, ...]:
    """Return the names of kernels that a process of the group has refused: programs are traced without
    them."""
    names, bad = sorted({check.kernel for check in kernels.values()}), failed_kernel_names(kernels)
    flags = any_across_ranks([name in bad for name in names])
    return tuple(name for name, is_bad in zip(names, flags, strict=True) if is_bad)


def make_scheduler_config(
    options: EngineOptions, sizes: Sizes, shapes: Sequence[Shape], row_multiple: int, stages: int
) -> SchedulerConfig:
    """Return the limits of an engine with these shapes; prefills begin at multiples of `row_multiple`."""
    return SchedulerConfig(
        max_num_seqs=sizes.num_slots,
        max_prefill_tokens=round_up(options.prefill_tokens, row_multiple),
        row_tokens=min_row_tokens(shapes),
        decode_steps=options.max_decode_steps,
        max_draft_tokens=options.max_draft_tokens,
        groups=options.micro_batches or min(stages, sizes.max_num_seqs),
        shards=sizes.shards,
    )


def compile_programs(phases: Phases, params: EngineParams, sizes: Sizes, *options: Any) -> ProgramTable:
    """Compile programs for the placement of the parameters.

    options: arguments of `ProgramTable` after the lowering.
    """
    if num_device_groups(params) > 1:
        return ProgramTable(PipelineLowering.from_params(phases, params, sizes), *options)
    lowering = LocalLowering.from_params(phases, params, sizes)
    if target_params(params).embed.is_fully_addressable:
        return ProgramTable(lowering, *options)
    return compile_in_group(lowering, params, *options)


def make_serving_executor(local: LocalExecutor, arguments: StepArguments) -> Executor:
    """Return the executor of an engine, by the placement of the parameters. On the ranks of a group that
    follow rank 0 it never returns."""
    if isinstance(local.programs.lowering, PipelineLowering):
        return PipelineExecutor(local, local.programs.lowering.stages)
    if target_params(arguments.params).embed.is_fully_addressable:
        return local
    return make_group_executor(local, arguments)


def may_serve_early(options: EngineOptions, params: EngineParams) -> bool:
    """Return True if an engine may serve before all of its programs are compiled.

    It needs one device, and no adapters: their slots are used to compare programs.
    """
    return not options.enable_lora and len(tree_devices(params)) == 1 and not must_compile_first(options)


def must_compile_first(options: EngineOptions) -> bool:
    """Return True if an engine serves only after all of its programs are compiled.

    Threads must see jax's settings as they are here. Settings of a `with` block hold for its thread alone.
    """
    if not options.background_compilation:
        return True
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: jax.config.values).result() != jax.config.values


def timed_depths(options: EngineOptions) -> tuple[int, ...]:
    """Return the numbers of draft tokens whose steps are timed; () if the number does not adapt.

    Several numbers are timed if a model drafts tokens one by one.
    """
    k, speculation = options.max_draft_tokens, options.speculation
    if not k or not speculation.adaptive:
        return ()
    is_sequential = speculation.model is not None and not options.tree_nodes
    return tuple(sorted({min(n, k) for n in (1, 3, k)})) if is_sequential else (k,)


def are_programs_stored(programs: ProgramTable, params: EngineParams, goal: WarmupGoal) -> bool:
    """Return True if all programs were read from disk, and their classes too if they are needed."""
    if not programs.are_all_stored or not goal.reproducible:
        return programs.are_all_stored
    return (
        executable_cache.read_record(classes_key(programs, params, goal.canonical), ShapeClasses) is not None
    )


def make_speculation(
    options: EngineOptions, classes: ShapeClasses, seconds: Mapping[tuple[int, int], float] | None
) -> Speculation | None:
    """Return the drafter, with a controller if the number of draft tokens adapts; None without speculation.

    Raises ValueError if verification cannot keep the reproducibility contract.
    """
    if not options.max_draft_tokens:
        return None
    if not classes.verify:
        raise ValueError(
            "speculative_config: on this device no verification gives the bits of decode: "
            "set reproducible=False"
        )
    k = min(options.max_draft_tokens, max(s.tokens for s in classes.verify) - 1)
    if seconds is not None:  # each shard computes this number of tokens
        seconds = {(size * options.data_parallel_size, n): t for (size, n), t in seconds.items()}
    controller = None if seconds is None else Controller(seconds, unit=0 if options.tree_nodes else 1)
    return Speculation(make_host_drafter(options.speculation), k, controller)


def make_speculation_or_warn(
    options: EngineOptions, classes: ShapeClasses, seconds: Mapping[tuple[int, int], float] | None
) -> Speculation | None:
    """Like `make_speculation`, for an engine that serves already: errors are warnings, and it gets no draft
    tokens."""
    try:
        return make_speculation(options, classes, seconds)
    except ValueError as error:
        warn_once(str(error))
        return None


def check_param_placement(params: Decoder) -> Decoder:
    """Check the placement of parameters, and return them; a pipeline's get a head on the last stage.

    Raises TypeError unless each is a jax.Array: others would be copied to the device in every step. Raises
    ValueError unless all of a stage are on the same devices, with a NamedSharding if these are several.
    """
    require_arrays(params)
    if has_separate_ffn(params):
        require_same_devices(params_without_ffn(params))
        require_same_devices(ffn_params_by_layer(params))
        return params
    params = with_last_stage_head(params)
    spans = pipeline_stages(params) if params.layers else []
    for span in spans if len(spans) > 1 else [range(len(params.layers))]:
        require_same_devices(stage_params(params, span) if len(spans) > 1 else params)
    return params


def require_arrays(params: Decoder) -> None:
    """Raise TypeError for a parameter that is no array, and ValueError for one without its numbers."""
    if not isinstance(params, Decoder) or params.embed is None:
        raise TypeError(f"parameters are a Decoder, not {type(params).__name__}")
    for path, leaf in leaves_by_path(params).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"parameter {path} is a {type(leaf).__name__}, expected a jax.Array: use jax.device_put"
            )
        if leaf.is_deleted():
            raise ValueError(f"parameter {path} was deleted or donated, expected an array with numbers")


def require_finite(params: Decoder) -> None:
    """Raise ValueError with the name of a parameter of this process that holds NaN or infinity, or codes
    without a scale."""
    local_params = {path: leaf for path, leaf in leaves_by_path(params).items() if leaf.is_fully_addressable}
    if (path := find_non_finite(local_params)) is not None:
        raise ValueError(
            f"parameter {path} holds NaN or infinity as {local_params[path].dtype}, expected finite numbers"
        )
    if (path := find_lost_codes(params)) is not None:
        raise ValueError(f"parameter {path} {LOST_CODES}")


def require_same_devices(params: Any) -> None:
    """Raise ValueError unless all parameters are on the same devices. On several they need a
    NamedSharding."""
    path, first = next(iter(leaves_by_path(params).items()))
    expected = first.sharding.device_set
    for leaf_path, leaf in leaves_by_path(params).items():
        sharding, devices_of_leaf = leaf.sharding, leaf.sharding.device_set
        if devices_of_leaf != expected:
            raise ValueError(
                f"parameter {leaf_path} lies on {join_device_names(devices_of_leaf)}, "
                f"{path} on {join_device_names(expected)}: all must lie on the same devices"
            )
        if len(devices_of_leaf) > 1 and not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"parameter {leaf_path} has a {type(sharding).__name__}, expected a NamedSharding"
            )
        if not leaf.is_fully_addressable and current_group() is None:
            raise ValueError(
                f"parameter {leaf_path} lies on other processes' devices too, expected this one's: set nnodes"
            )


def join_device_names(devices: set[Any]) -> str:
    return " and ".join(sorted(map(str, devices)))
