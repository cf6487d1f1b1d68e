"""CPU kernels of an engine: whether it uses them, why not, and their build at the first use on a machine."""

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....cpu_kernels.build import ARM, ISAS, BuildError, build_cached, is_supported, library_file
from ....cpu_kernels.library import library
from ....kvcache.kernels.cpu_attention import layers_read
from ....kvcache.quantised import kept_as
from ....model.config import ModelConfig
from ...host import progress
from ...host.devices import processor
from ...options.engine import EngineOptions
from .dtype import dtype_name
from .mesh import layout_of

NOT_ASKED = "cpu_kernels is False, or none of the weights is one that they multiply"


def with_kernels(
    options: EngineOptions, device: Any, config: ModelConfig, dtype: Any, devices: int = 1
) -> EngineOptions:
    """Return the options with `cpu_kernels` decided: as given; for None True if nothing speaks against them
    (`left_out`) and they can be used. Builds the library if it is not there.

    dtype: as of `dtype_name`. devices: their number, if a mesh is given. Raises ValueError if the option is
    True and the library cannot be built.
    """
    if options.cpu_kernels is not None:
        build_kernels(options, device.platform)
        return options
    if device.platform != "cpu" or compiles_quickly():
        return replace(options, cpu_kernels=False)
    several = max(devices, layout_of(options).size) > 1
    if reason := left_out(options, config, dtype_name(dtype), several) or unusable():
        progress.say(f"without CPU kernels: {reason}")
    return replace(options, cpu_kernels=not reason)


def kernels_refusal(
    options: EngineOptions, device: Any, config: ModelConfig, dtype: Any, devices: int = 1
) -> str:
    """Return why an engine on a CPU computes without kernels, or without those of the processor's best
    instruction set, for options and arguments of `with_kernels`; "" on accelerators. Builds nothing."""
    if device.platform != "cpu":
        return ""
    if options.cpu_kernels:
        return library().refusal
    if options.cpu_kernels is None:
        return "cpu_kernels is not set, and parameters that are given are served where they lie"
    if compiles_quickly():
        return "jax_disable_most_optimizations is set"
    several = max(devices, layout_of(options).size) > 1
    reason = left_out(options, config, dtype_name(dtype), several)
    return reason or library().refusal or NOT_ASKED


def compiles_quickly() -> bool:
    """True in a process that has switched off XLA's optimisations: it waits for no other compiler."""
    return bool(jax.config.values["jax_disable_most_optimizations"])


def left_out(options: EngineOptions, config: ModelConfig, dtype: str, several: bool) -> str:
    """Return why kernels are not chosen on a CPU, or on `several`, "" if they are: there are none, or XLA's
    may be faster."""
    computed = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    kept, layers = kept_as(options.kv_cache_dtype, computed), config.layers
    if not is_supported():
        return "there are none for this kind of machine"
    if ISAS == ARM:
        return "whether they are faster than XLA's products on ARM was not measured"
    if "amx_bf16" in processor():
        return "XLA multiplies by AMX, and whether they do so faster was not measured"
    if several:
        return "they are for one device"
    if any(layer.state for layer in layers) or layers_read(layers, kept, computed) < len(layers):
        return "they do not read the keys of all layers in this dtype"
    return ""


def unusable() -> str:
    """Build the library if it is not there; return why nothing of it can be used, "" if something can."""
    try:
        build_missing()
    except (RuntimeError, BuildError) as error:
        return str(error)
    found = library()
    return "" if found.isas else found.refusal


def build_kernels(options: EngineOptions, platform: str) -> None:
    """Build the library of CPU kernels into the user's cache, if the options ask for it on a CPU and it is
    not there. Raises ValueError with the reason if it cannot be built."""
    if not options.cpu_kernels or platform != "cpu":
        return
    try:
        build_missing()
    except (RuntimeError, BuildError) as error:
        raise ValueError(f"cpu_kernels=True is not allowed: {error}") from error


def build_missing() -> None:
    if not os.path.exists(library_file()):
        progress.say("compiling the CPU kernels, once; this takes some seconds")
        build_cached()
