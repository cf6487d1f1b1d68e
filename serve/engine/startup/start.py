"""From parameters at hand to a warm engine."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from ....kvcache.stages import attending, devices, feeding, is_apart, params_of, stages, stations
from ....model.config import Experts, ModelConfig
from ....model.pair import PairConfig, Params, target_of
from ....model.transformer import Decoder, Observe
from ....model.tree import not_finite, paths
from ....model.weights.compress import in_form
from ....model.weights.cpu.packed import kernels_in
from ....model.weights.prepared import prepared
from ....sampling.custom import processors_of
from ...host import progress
from ...host.devices import memory_limit
from ...host.process import keep_freed, use_huge_pages
from ...host.streams import warn
from ...kv.offload.opening import OnRealm, check, mover_of
from ...kv.offload.peer import RemoteKV
from ...options.checks import round_up
from ...options.engine import EngineOptions
from ...runtime.compiled import executable_cache, jaxcache
from ...runtime.compiled.compile import Programs
from ...runtime.compiled.shapes import (
    Canonical,
    Shape,
    Sizes,
    decided,
    least_row,
    shapes_of,
)
from ...runtime.compiled.sizing import choose_sizes
from ...runtime.equal_bits.classes import ShapeClasses, choose_classes, record, step_seconds
from ...runtime.equal_bits.warmup import Warmup, WarmupGoal, first_shapes
from ...runtime.multihost.programs import SharedPrograms
from ...runtime.multihost.rendezvous import group, in_any_rank
from ...runtime.pipeline.programs import StagedPrograms
from ..core.engine import Engine
from ..core.guessing import Speculation
from ..core.plan import SchedulerConfig
from ..lora.writer import roomy
from ..speculation.beside import check_states, read_beside
from ..speculation.controller import Controller
from ..speculation.drafter import host_drafter
from .cpu_kernels import build_kernels, kernels_refusal
from .dtype import check_cache
from .kernel_checks import KernelChecks, check_kernels, refused_by, require_ended
from .mesh import check_experts, layout_of, spread
from .stages import with_head


def start_engine(
    config: ModelConfig,
    params: Decoder,
    options: EngineOptions,
    peer: RemoteKV | None = None,
    on_realm: OnRealm | None = None,
) -> Engine:
    """Size, compile and warm up an engine for parameters that are on their device. Raises TypeError for other
    parameters.

    peer: prefill engine that computes prompts for this one.
    on_realm: called with the realm of the pages, if the engine sends them to others.
    """
    if options.has_tiers:
        check(options)
    with progress.telling(options.use_tqdm_on_load):
        engine = warm_engine(config, params, options)
        if options.has_tiers or peer is not None:
            engine.attach(mover_of(options, engine.programs, engine.everything, peer, on_realm))
    jaxcache.seal()
    return engine


def warm_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    params = on_devices(params)
    device = next(iter(params.embed.sharding.addressable_devices))
    options = options.on(memory_limit(device))
    options.require_unstored("these are parameters")
    check_cache(options, device)
    build_kernels(options, device.platform)
    params = spread(config, params, layout_of(options))
    params = in_form(params, options.quantization, params.embed.dtype)
    check_experts(params)
    params = prepared(params, options.batch_invariant_matmul, bool(options.cpu_kernels), options.tied_head)
    options, without = settled(options, device, config, params)
    if device.platform == "cpu":
        keep_freed()
    count = stations(params)
    options.check_stages(count)
    params = roomy(params, config, options)
    beside = read_beside(options.speculation, config, params)
    pair, everything = PairConfig(config, beside.config), beside.join(params)
    use_huge_pages(everything)
    check_states(pair, options.speculation, count)
    sizes = choose_sizes(pair, options, everything, memory_limit(device))
    own = processors_of(options.logits_processors, config.vocab_size, sizes.max_model_len)
    sizes = replace(sizes, hidden=config.hidden_size if beside.is_head else 0, processors=own)
    shapes = shapes_of(options, sizes, pair.layers, device.platform, params.embed.dtype)
    canonical = Canonical.on(device.platform, options, sizes)
    observe = observed_in(config, options)
    phases = beside.phases(pair.within(sizes.max_model_len), options.speculation, observe)
    early = first_shapes(shapes, canonical) if may_serve_early(options, everything) else shapes
    kernels = check_kernels(config, params, sizes)
    require_ended(kernels)
    programs = kind_of(everything)(
        phases, everything, sizes, shapes, early, refused_of(kernels), options.reproducible
    )
    state, aim = (
        programs.empty(everything),
        WarmupGoal(canonical, options.reproducible, timed_depths(options)),
    )
    limits = limits_of(options, sizes, shapes, pair.block, count)
    prefixes, later = options.enable_prefix_caching, deferral(options, programs, canonical)
    make = partial(Engine, programs, limits=limits, prefix_caching=prefixes, later=later, kernels=kernels)
    make = partial(make, without_cpu_kernels=without)
    if set(early) < set(shapes) and not are_known(programs, everything, aim):
        classes = ShapeClasses.of(early, same_bits=not options.reproducible)
        found = record(programs, everything, canonical) if aim.reproducible else None
        warmup = Warmup(programs, shapes, classes, aim, partial(late_speculation, options), found)
        return make(classes, state, warmup=warmup)
    classes, state = choose_classes(programs, state, canonical, options.reproducible)
    seconds = None
    if aim.depths and classes.verify:
        seconds, state = step_seconds(programs, state, canonical, classes, aim.depths)
    speculation = speculation_of(options, classes, seconds)
    programs.begin(state)
    return make(classes, state, speculation=speculation)


def observed_in(config: ModelConfig, options: EngineOptions) -> Observe | None:
    """Return the inner values that steps report, if any. Raises ValueError for what the model lacks."""
    if not options.is_observing:
        return None
    layers, experts = tuple(options.hidden_state_layers or ()), options.enable_return_routed_experts
    wrong = [n for n in layers if n > config.num_layers]
    if wrong:
        raise ValueError(f"hidden_state_layers {wrong[0]} is not allowed: 0 to {config.num_layers}")
    if experts and not any(isinstance(kind.ffn, Experts) for kind in config.layers):
        raise ValueError("enable_return_routed_experts is not allowed: the model has no experts")
    return Observe(experts, layers)


def settled(
    options: EngineOptions, device: Any, config: ModelConfig, params: Decoder
) -> tuple[EngineOptions, str]:
    """Return the options with `cpu_kernels` where it has an effect on prepared parameters, and why an engine
    on a CPU has none, or not the best."""
    asked, isa = options.cpu_kernels, kernels_in(params)
    options = decided(options, params) if asked else options
    without = kernels_refusal(options, device, config, params.embed.dtype, len(devices(params)))
    if asked:
        none = "cpu_kernels has no effect: none of the weights is one that CPU kernels multiply"
        named = "; ".join(filter(None, (isa, without)))
        progress.say(f"products by CPU kernels ({named})" if isa else none)
    return options, without


def refused_of(kernels: KernelChecks) -> tuple[str, ...]:
    """Return the kernels that programs are traced without: those that any process of a group has refused."""
    names, bad = sorted({check.kernel for check in kernels.values()}), refused_by(kernels)
    flags = in_any_rank([name in bad for name in names])
    return tuple(name for name, is_bad in zip(names, flags, strict=True) if is_bad)


def limits_of(
    options: EngineOptions, sizes: Sizes, shapes: Sequence[Shape], block: int, stages: int
) -> SchedulerConfig:
    """Return the limits of an engine with these shapes; prefills begin at multiples of `block`."""
    return SchedulerConfig(
        max_num_seqs=sizes.seats,
        max_prefill_tokens=round_up(options.prefill_tokens, block),
        row=least_row(shapes),
        decode_steps=options.most_steps,
        guesses=options.guesses,
        groups=options.micro_batches or min(stages, sizes.max_num_seqs),
        shards=sizes.shards,
    )


def kind_of(params: Params) -> type[Programs]:
    """Return the class of programs for the placement of the parameters."""
    if stations(params) > 1:
        return StagedPrograms
    return Programs if target_of(params).embed.is_fully_addressable else SharedPrograms


def may_serve_early(options: EngineOptions, params: Params) -> bool:
    """Return True if an engine may serve before all of its programs are compiled: on one device, without
    adapters, whose places are used to compare programs, and if programs may come late."""
    return not options.enable_lora and len(devices(params)) == 1 and may_compile_late(options)


def may_compile_late(options: EngineOptions) -> bool:
    """Return True if programs may be compiled while an engine serves: threads see jax's settings as they are
    here, not only in a block of code."""
    if not options.background_compilation:
        return False
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: jax.config.values).result() == jax.config.values


def deferral(
    options: EngineOptions, programs: Programs, canonical: Canonical
) -> Callable[[ShapeClasses], Warmup] | None:
    """Return a maker of deferred draws, which wait for the masks of grammars while other rows go on; None if
    programs may not come late, if steps verify draft tokens, or if a step has several programs or
    processes."""
    several = isinstance(programs, StagedPrograms | SharedPrograms)
    if several or options.guesses or options.is_observing or not may_compile_late(options):
        return None
    aim = WarmupGoal(canonical, options.reproducible, depths=())

    def later(classes: ShapeClasses) -> Warmup:
        return Warmup(programs, [s.deferred for s in classes.single_steps], classes, aim, lambda *_: None)

    return later


def timed_depths(options: EngineOptions) -> tuple[int, ...]:
    """Return the numbers of draft tokens in steps that are timed, if their number adapts: several if a model
    drafts them one by one."""
    k, speculation = options.guesses, options.speculation
    if not k or not speculation.adaptive:
        return ()
    in_turn = speculation.model is not None and not options.nodes
    return tuple(sorted({min(n, k) for n in (1, 3, k)})) if in_turn else (k,)


def are_known(programs: Programs, params: Params, aim: WarmupGoal) -> bool:
    """Return True if all programs were read from disk, and their classes with them."""
    if not programs.loaded or not aim.reproducible:
        return programs.loaded
    return executable_cache.read(record(programs, params, aim.canonical), ShapeClasses) is not None


def speculation_of(
    options: EngineOptions, classes: ShapeClasses, seconds: Mapping[tuple[int, int], float] | None
) -> Speculation | None:
    """Return the drafter, with a controller if the number of draft tokens adapts; None without speculation.

    Raises ValueError if verification cannot keep the reproducibility contract.
    """
    if not options.guesses:
        return None
    if not classes.verify:
        raise ValueError(
            "speculative_config: on this device no verification gives the bits of decode: "
            "set reproducible=False"
        )
    k = min(options.guesses, max(s.tokens for s in classes.verify) - 1)
    if seconds is not None:  # a step computes as many tokens in each shard
        seconds = {(size * options.data_parallel_size, n): t for (size, n), t in seconds.items()}
    controller = None if seconds is None else Controller(seconds, unit=0 if options.nodes else 1)
    return Speculation(host_drafter(options.speculation), k, controller)


def late_speculation(
    options: EngineOptions, classes: ShapeClasses, seconds: Mapping[tuple[int, int], float] | None
) -> Speculation | None:
    """Do the same in an engine that serves already; it goes on without draft tokens if there can be none."""
    try:
        return speculation_of(options, classes, seconds)
    except ValueError as error:
        warn(str(error))
        return None


def on_devices(params: Decoder) -> Decoder:
    """The parameters, a pipeline's with a head. Raises TypeError unless each is on a device: others would be
    copied there in every step.

    Raises ValueError for one that lies on other devices than the embedding, and on several without saying
    how.
    """
    require_arrays(params)
    if is_apart(params):
        require_together(attending(params))
        require_together(feeding(params))
        return params
    params = with_head(params)
    found = stages(params) if params.layers else []
    for span in found if len(found) > 1 else [range(len(params.layers))]:
        require_together(params_of(params, span) if len(found) > 1 else params)
    return params


def require_arrays(params: Decoder) -> None:
    """Raise TypeError for a parameter that is no array."""
    if not isinstance(params, Decoder) or params.embed is None:
        raise TypeError(f"parameters are a Decoder, not {type(params).__name__}")
    for path, leaf in paths(params).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"parameter {path} is a {type(leaf).__name__}, expected a jax.Array: use jax.device_put"
            )


def require_finite(params: Decoder) -> None:
    """Raise ValueError, naming a parameter, where one of this process holds NaN or infinity."""
    own = {path: leaf for path, leaf in paths(params).items() if leaf.is_fully_addressable}
    if (path := not_finite(own)) is not None:
        raise ValueError(f"parameter {path} holds NaN or infinity, expected finite numbers")


def require_together(params: Any) -> None:
    """Raise ValueError unless all parameters lie on the same devices, in shardings with names if these are
    several."""
    path, first = next(iter(paths(params).items()))
    expected = first.sharding.device_set
    for other, leaf in paths(params).items():
        own, found = leaf.sharding, leaf.sharding.device_set
        if found != expected:
            raise ValueError(
                f"parameter {other} lies on {named(found)}, {path} on {named(expected)}: "
                "all must lie on the same devices"
            )
        if len(found) > 1 and not isinstance(own, NamedSharding):
            raise ValueError(f"parameter {other} has a {type(own).__name__}, expected a NamedSharding")
        if not leaf.is_fully_addressable and group() is None:
            raise ValueError(
                f"parameter {other} lies on other processes' devices too, expected this one's: set nnodes"
            )


def named(devices: set[Any]) -> str:
    return " and ".join(sorted(map(str, devices)))
