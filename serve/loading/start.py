"""From parameters at hand to a warm engine."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from ...model.config import ModelConfig
from ...model.pair import PairConfig
from ...model.transformer import Decoder
from ...model.tree import paths
from ...model.weights.compress import in_form
from ...model.weights.fixed import fixed
from ...model.weights.turned import turned
from ..engine.engine import Engine
from ..engine.guessing import Speculation
from ..engine.scheduler import Limits
from ..host import progress
from ..host.devices import memory_limit
from ..host.memory import keep_freed
from ..options.engine import EngineOptions
from ..programs import jaxcache
from ..programs.classes import Classes, choose_classes, step_seconds
from ..programs.compile import Arguments, Programs
from ..programs.shapes import Canonical, can_share, least_row, table
from ..programs.sizing import choose_sizes
from ..speculation.beside import read_beside
from ..speculation.drafter import host_drafter


def start_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    """Size, compile and warm up an engine for parameters that are on their device. Raises TypeError for
    others."""
    with progress.telling(options.use_tqdm_on_load):
        engine = warm_engine(config, params, options)
    jaxcache.seal()
    return engine


def warm_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    require_arrays(params)
    device = next(iter(params.embed.devices()))
    options = options.on(memory_limit(device))
    options.require_unstored("these are parameters")
    params = in_form(params, options.quantization, params.embed.dtype)
    params = turned(params)
    params = fixed(params) if options.fixed_products else params
    if device.platform == "cpu":
        keep_freed()
    beside = read_beside(options.speculation, config, params)
    pair, everything = PairConfig(config, beside.config), beside.join(params)
    sizes = choose_sizes(pair, options, everything, memory_limit(device))
    sizes = replace(sizes, hidden=config.hidden_size if beside.is_head else 0)
    shapes = table(options, sizes, can_share(pair.layers), device.platform)
    canonical = Canonical.on(device.platform, options, sizes)
    phases = beside.phases(pair.within(sizes.max_model_len), options.speculation)
    programs = Programs(phases, everything, sizes, shapes)
    classes, state = choose_classes(programs, programs.empty(everything), canonical, options.reproducible)
    speculation, state = start_speculation(programs, classes, state, options, canonical)
    limits = Limits(
        max_num_seqs=sizes.max_num_seqs,
        max_prefill_tokens=options.prefill_tokens,
        row=least_row(classes.prefill),
        decode_steps=max(s.tokens for s in classes.decode),
        guesses=options.guesses,
    )
    return Engine(programs, classes, state, limits, options.enable_prefix_caching, speculation)


def start_speculation(
    programs: Programs,
    classes: Classes,
    state: Arguments,
    options: EngineOptions,
    canonical: Canonical,
) -> tuple[Speculation | None, Arguments]:
    """The drafter and, where the number of guesses adapts, the time of every shape; None without guesses.

    Raises ValueError where verification cannot keep the reproducibility contract.
    """
    config, k = options.speculation, options.guesses
    if not k:
        return None, state
    if not classes.verify:
        raise ValueError(
            "speculative_config: on this device no verification gives the bits of decode: "
            "set reproducible=False"
        )
    k, seconds = min(k, max(s.tokens for s in classes.verify) - 1), None
    if config.adaptive:
        seconds, state = step_seconds(programs, state, canonical, classes, k)
    return Speculation(host_drafter(config), k, seconds), state


def require_arrays(params: Decoder) -> None:
    """Raise TypeError unless every parameter is on a device: others would be copied there in every step.

    Raises ValueError for one that lies on other devices than the embedding, and on several without saying
    how.
    """
    if not isinstance(params, Decoder) or params.embed is None:
        raise TypeError(f"parameters are a Decoder, not {type(params).__name__}")
    for path, leaf in paths(params).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"parameter {path} is a {type(leaf).__name__}, expected a jax.Array: use jax.device_put"
            )
    expected = params.embed.sharding.device_set
    for path, leaf in paths(params).items():
        own, found = leaf.sharding, leaf.sharding.device_set
        if found != expected:
            raise ValueError(
                f"parameter {path} lies on {named(found)}, embed on {named(expected)}: "
                "all must lie on the same devices"
            )
        if len(found) > 1 and not isinstance(own, NamedSharding):
            raise ValueError(f"parameter {path} has a {type(own).__name__}, expected a NamedSharding")
        if not leaf.is_fully_addressable:
            raise ValueError(
                f"parameter {path} lies on other processes' devices too, expected this one's only"
            )


def named(devices: set[Any]) -> str:
    return " and ".join(sorted(map(str, devices)))
