"""CPU kernels of an engine: whether it uses them, why not, and their build at the first use on a machine."""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....cpu_kernels.build import (
    ARM,
    ISAS,
    SOURCE_FOLDER,
    BuildError,
    build_cached_library,
    is_supported,
    library_file,
    needs_build,
)
from ....cpu_kernels.library import load_library
from ....kvcache.kernels.cpu_attention import count_kernel_layers
from ....kvcache.quantised import choose_cache_format
from ....model.config import ModelConfig
from ...host import progress
from ...options.engine import EngineOptions
from .dtype import normalise_dtype_name
from .mesh import make_layout

NOT_ASKED = "cpu_kernels is False, or none of the weights is one that they multiply"


def decide_cpu_kernels(
    options: EngineOptions, device: Any, config: ModelConfig, dtype: Any, devices: int = 1
) -> EngineOptions:
    """Return the options with `cpu_kernels` decided, and build the library if it is missing.

    True and False stay. None becomes True if no reason of `explain_default_without_kernels` applies and the
    kernels can be used.

    dtype: as `normalise_dtype_name` takes it.
    devices: number of devices of a given mesh.

    Raises ValueError if the option is True and the library cannot be built.
    """
    if options.cpu_kernels is not None:
        build_kernels_if_requested(options, device.platform)
        return options
    if device.platform != "cpu" or is_optimisation_off():
        return replace(options, cpu_kernels=False)
    has_several_devices = max(devices, make_layout(options).num_devices) > 1
    if (
        reason := explain_default_without_kernels(
            options, config, normalise_dtype_name(dtype), has_several_devices
        )
        or build_or_explain()
    ):
        progress.write_progress_line(f"without CPU kernels: {reason}")
    return replace(options, cpu_kernels=not reason)


def explain_unused_cpu_kernels(
    options: EngineOptions, device: Any, config: ModelConfig, dtype: Any, devices: int = 1
) -> str:
    """Return why an engine on a CPU computes without kernels, or not with the best instruction set.

    Returns "" on accelerators. Takes the arguments of `decide_cpu_kernels`, and builds nothing.
    """
    if device.platform != "cpu":
        return ""
    if options.cpu_kernels:
        return load_library().refusal
    if options.cpu_kernels is None:
        return "cpu_kernels is not set, and parameters that are given are served where they lie"
    if is_optimisation_off():
        return "jax_disable_most_optimizations is set"
    has_several_devices = max(devices, make_layout(options).num_devices) > 1
    reason = explain_default_without_kernels(
        options, config, normalise_dtype_name(dtype), has_several_devices
    )
    return reason or load_library().refusal or NOT_ASKED


def is_optimisation_off() -> bool:
    """Return True if XLA's optimisations are switched off: then no kernels are compiled either."""
    return bool(jax.config.values["jax_disable_most_optimizations"])


def explain_default_without_kernels(
    options: EngineOptions, config: ModelConfig, dtype: str, has_several_devices: bool
) -> str:
    """Return why CPU kernels are not chosen by default; "" if they are.

    Either there are none for this machine or model, or XLA's products may be faster. `has_several_devices`:
    the engine has several devices.
    """
    compute_dtype = jnp.dtype("bfloat16" if dtype == "auto" else dtype)
    cache_format, layers = choose_cache_format(options.kv_cache_dtype, compute_dtype), config.layers
    if not is_supported():
        return "there are none for this kind of machine"
    if ISAS == ARM:
        return "whether they are faster than XLA's products on ARM was not measured"
    if has_several_devices:
        return "they are for one device"
    if any(layer.state_shapes for layer in layers) or count_kernel_layers(
        layers, cache_format, compute_dtype
    ) < len(layers):
        return "they do not read the keys of all layers in this dtype"
    return ""


def build_or_explain() -> str:
    """Build the library if it is missing; return why it cannot be used, or ""."""
    try:
        build_missing_library()
    except (RuntimeError, BuildError) as error:
        return str(error)
    kernels = load_library()
    return "" if kernels.isas else kernels.refusal


def build_kernels_if_requested(options: EngineOptions, platform: str) -> None:
    """Build the library of CPU kernels in the user's cache, if the options ask for it on a CPU.

    Raises ValueError with the reason if it cannot be built.
    """
    if not options.cpu_kernels or platform != "cpu":
        return
    try:
        build_missing_library()
    except (RuntimeError, BuildError) as error:
        raise ValueError(f"cpu_kernels=True is not allowed: {error}") from error


def build_missing_library() -> None:
    """Build the library in the user's cache if it is missing or damaged.

    A damaged library in the sources' folder stays as it is: `library` refuses it.
    """
    path = library_file()
    with suppress(OSError):  # `library` reports a file that cannot be read
        if not os.path.exists(path) or (path.parent != SOURCE_FOLDER and needs_build(path)):
            progress.write_progress_line("compiling the CPU kernels, once; this takes some seconds")
            build_cached_library()
