"""Facts of a process that decide its programs and their bits. What is stored or sent is reused only where
these facts are equal.

`REUSE` has the names of the facts that each use compares. A use adds facts of its own, such as shapes,
options and weights.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from .devices import num_cores, processor_flags, processor_name

LIBRARY_MODULES = ("cpu_kernels", "model", "kvcache", "sampling", "serve")
# Modules that trace, lower and compare steps. Their source is hashed into the keys of programs and
# measurements: an edit of another module recompiles nothing.
TRACED_MODULES = (
    "cpu_kernels",
    "model",
    "kvcache",
    "sampling",
    "serve.engine.speculation.draft_proposers",
    "serve.engine.speculation.draft_steps",
    "serve.engine.startup.bfloat16_gain",
    "serve.engine.startup.code_cases",
    "serve.engine.startup.kernel_case",
    "serve.engine.startup.kernel_cases",
    "serve.engine.startup.kernel_checks",
    "serve.runtime.compiled",
    "serve.runtime.equal_bits",
    "serve.runtime.pipeline",
    "serve.runtime.steps",
)
COMPILER_PACKAGES = ("jax", "jaxlib")
TEXT_PACKAGES = ("tokenizers", "sentencepiece", "jinja2", "llguidance")  # decide which tokens a prompt has
# Environment variables of compilers. The last two are the number of XLA's threads on a CPU.
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "NPROC", "PJRT_NPROC")
# Options of XLA that decide no program. Ranks may differ in them.
RANK_FLAGS = re.compile(r"--xla_(dump_|force_host_platform_device_count)\S*")
JAX_SETTINGS = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_threefry_partitionable",
)  # fmt: skip
# Settings that few users change, with jax's defaults. Facts have only settings that are not the default.
RARE_JAX_SETTINGS = {
    "jax_disable_most_optimizations": "False",
    "jax_exec_time_optimization_effort": "0.0",
    "jax_optimization_level": "UNKNOWN",
}

# The facts that must be equal, by use.
REUSE = {
    # a program, a measurement or a check that an earlier start has stored
    "program": (
        "traced source", "compiler", "kernel compiler", "device", "cores", "instructions", "variables",
        "all settings",
    ),
    # pages and answers of another process, without and with the reproducibility contract
    "inexact realm": ("source",),
    "exact realm": (
        "source", "compiler", "kernel compiler", "device", "cores", "instructions", "variables",
        "all settings",
    ),
    # answers that a batch job has written, and that an audit log claims
    "job": ("device", "cores", "processor", "compiler", "text packages", "variables", "settings"),
    "audit": ("source", "device", "cores", "processor", "compiler", "text packages", "variables", "settings"),
    # processes of a group, before and after jax has looked for devices
    "rank": ("compiler", "source", "rank variables", "settings"),
    "rank device": ("device", "instructions"),
}  # fmt: skip


def gather_facts(use: str, device: Any = None) -> dict[str, str]:
    """Return the facts of a use in `REUSE`, by name. `device` may be None if none of them is of a device."""
    facts: dict[str, str] = {}
    for name in REUSE[use]:
        facts |= FACTS[name](device)
    return facts


def hash_facts(*facts: Any) -> str:
    """Return the SHA-256 of facts, by their `repr`."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


# ---------------------------------------------------------------- each fact


def device_facts(device: Any) -> dict[str, str]:
    return {"device": device.device_kind, "runtime": " ".join(device.client.platform_version.split())}


def cpu_fact(device: Any, name: str, describe: Callable[[], Any]) -> dict[str, str]:
    """Return a fact of the host's processor. Programs of an accelerator have none."""
    return {name: str(describe())} if device.platform == "cpu" else {}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    versions = {package: installed_version(package) for package in packages}
    return {package: number for package, number in versions.items() if number}


@cache
def installed_version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def compiler_variables() -> dict[str, str]:
    """Return `COMPILER_VARIABLES` that are set. If XLA_FLAGS is the path of a file, it comes with the file's
    content."""
    variables = {name: os.environ[name] for name in COMPILER_VARIABLES if os.environ.get(name)}
    flags = variables.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):
        with suppress(OSError, UnicodeDecodeError):
            variables["XLA_FLAGS"] = f"{flags}: {Path(flags).read_text()}"
    return variables


def rank_variables() -> dict[str, str]:
    """Return the compilers' variables without `RANK_FLAGS`."""
    variables = compiler_variables()
    flags = " ".join(RANK_FLAGS.sub("", variables.get("XLA_FLAGS", "")).split())
    return variables | {"XLA_FLAGS": flags}


def jax_settings() -> dict[str, str]:
    """Return jax's settings that decide bits: `JAX_SETTINGS`, and `RARE_JAX_SETTINGS` that are not the
    default."""
    values = {name: str(value) for name, value in jax.config.values.items()}
    settings = {name: values[name] for name in JAX_SETTINGS if name in values}
    rare = {name: values.get(name, usual) for name, usual in RARE_JAX_SETTINGS.items()}
    return settings | {name: value for name, value in rare.items() if value != RARE_JAX_SETTINGS[name]}


def all_jax_settings() -> dict[str, str]:
    """Return every setting of jax, except settings of its caches."""
    return {name: str(value) for name, value in sorted(jax.config.values.items()) if "cache" not in name}


FACTS: dict[str, Callable[[Any], dict[str, str]]] = {
    "source": lambda _: {"source": library_hash()},
    "traced source": lambda _: {"traced source": imported_sources_hash()},
    "compiler": lambda _: package_versions(COMPILER_PACKAGES),
    "kernel compiler": lambda _: {"absl": str(find_spec("absl") is not None)},  # jax's kernels need it
    "text packages": lambda _: package_versions(TEXT_PACKAGES),
    "device": device_facts,
    "cores": lambda device: cpu_fact(device, "cores", num_cores),  # among which XLA divides products
    "processor": lambda device: cpu_fact(device, "processor", processor_name),
    "instructions": lambda device: cpu_fact(device, "instructions", processor_flags),
    "variables": lambda _: compiler_variables(),
    "rank variables": lambda _: rank_variables(),
    "settings": lambda _: jax_settings(),
    "all settings": lambda _: all_jax_settings(),
}


# ---------------------------------------------------------------- sources


@cache
def imported_sources_hash() -> str:
    """Return a hash of the code that programs are traced from, as it was when this module was imported."""
    return hash_traced_sources()


def hash_traced_sources() -> str:
    """Return a hash of the code that programs are traced from, as it is on disk now."""
    return hash_sources(path for name in TRACED_MODULES for path in module_paths(name))


@cache
def library_hash() -> str:
    """Return a hash of the code that decides answers: `LIBRARY_MODULES`, which have text and scheduling."""
    return hash_sources(path for name in LIBRARY_MODULES for path in module_paths(name))


def module_paths(name: str) -> list[str]:
    """Return the paths of a module of this library: a package's folder, or a module's file."""
    spec = find_spec(f"duetto.{name}")
    assert spec is not None and spec.origin is not None
    return list(spec.submodule_search_locations or [spec.origin])


def hash_sources(paths: Iterable[str | Path]) -> str:
    """Return a hash of the names and contents of Python files. A folder counts as all Python files in it."""
    hasher = hashlib.sha256()
    for root in map(Path, paths):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            hasher.update(f"{path.relative_to(root.parent)} ".encode() + path.read_bytes())
    return hasher.hexdigest()


imported_sources_hash()  # hashed now: this process does not run later edits
