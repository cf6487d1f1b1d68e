"""Patches of names that are private to jax: the suite has no others, and for these jax has nothing public.

`patch_compile_options` lets every program of a CPU compile by XLA's older emitters, in a third of the time.
`XLA_FLAGS` would choose the emitters of a whole process, in which modules marked `as_served` have today's.

`patch_serialization` lets a program be stored that came from jax's cache, which is all of them after an edit
that changes no program. Without it, later runs trace those programs again. A CPU serializes such a program
without its machine code.

A patch is applied if jax has its names with the parameters that are listed in `PATCHES`. With another jax the
suite runs without the patch, more slowly, and `tests/test_suite.py` fails with a sentence of `DIFFERENCES`.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import jax

VERSIONS = "0.10 to 0.12"  # of jax, whose names have these parameters
# Emitters before today's, and one thread: so small a program gains nothing from two.
OLDER_EMITTERS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
MAX_EXECUTABLES = 64


@cache
def has_older_emitters() -> bool:
    """Return whether XLA has the older emitters: newer versions have one kind only."""
    with suppress(jax.errors.JaxRuntimeError):
        jax.jit(lambda: 0).lower().compile(OLDER_EMITTERS)
        return True
    return False


def patch_compile_options() -> None:
    """Compile by the older emitters wherever most optimisations are off and no options are given."""
    compiler: Any = import_module("jax._src.compiler")
    get_compile_options = compiler.get_compile_options

    @wraps(get_compile_options)
    def get_quick_options(*arguments: Any, env_options_overrides: Any = None, **others: Any) -> Any:
        is_quick = jax.config.values["jax_disable_most_optimizations"]
        options = env_options_overrides or (OLDER_EMITTERS if is_quick else None)
        return get_compile_options(*arguments, env_options_overrides=options, **others)

    if has_older_emitters():
        compiler.get_compile_options = get_quick_options


class CacheHit(threading.local):
    """The bytes of the program that a thread has last taken from jax's cache."""

    content = b""


CACHE_HIT = CacheHit()
EXECUTABLES: OrderedDict[int, tuple[Any, bytes]] = OrderedDict()  # by id, the latest last


def patch_serialization() -> None:
    """Note the bytes of what comes from jax's cache, and serialize executables by those that are kept."""
    compilation_cache: Any = import_module("jax._src.compilation_cache")
    pickler: Any = import_module("jax.experimental.serialize_executable")._JaxPjrtPickler
    extract, get_persistent_id = compilation_cache.extract_executable_and_time, pickler.persistent_id

    @wraps(extract)
    def extract_and_note(content: bytes) -> tuple[bytes, int]:
        CACHE_HIT.content, seconds = extract(content)
        return CACHE_HIT.content, seconds

    @wraps(get_persistent_id)
    def get_id_by_bytes(self: Any, part: Any) -> Any:
        entry = EXECUTABLES.get(id(part))
        return ("exec", entry[1]) if entry else get_persistent_id(self, part)

    compilation_cache.extract_executable_and_time = extract_and_note
    pickler.persistent_id = get_id_by_bytes


def keep_bytes(executable: Any) -> None:
    """Remember the bytes of an executable that this thread has just taken from jax's cache."""
    EXECUTABLES[id(executable)] = executable, CACHE_HIT.content
    if len(EXECUTABLES) > MAX_EXECUTABLES:
        EXECUTABLES.popitem(last=False)


# Each patch, and the parameters of the private names that it replaces or relies on.
PATCHES: Mapping[Callable[[], None], Mapping[str, str]] = {
    patch_compile_options: {
        "jax._src.compiler:get_compile_options": "num_replicas, num_partitions, device_assignment, "
        "env_options_overrides, fdo_profile, detailed_logging, backend",
    },
    patch_serialization: {
        "jax._src.compilation_cache:extract_executable_and_time": "executable_and_time",
        "jax.experimental.serialize_executable:_JaxPjrtPickler.persistent_id": "self, obj",
    },
}
DIFFERENCES: dict[Callable[[], None], str] = {}  # why a patch is not applied


def apply_patches() -> None:
    """Apply each patch whose names are as expected, and note in `DIFFERENCES` why another is not applied."""
    for patch, names in PATCHES.items():
        if difference := find_difference(names):
            DIFFERENCES[patch] = difference
        else:
            patch()


def find_difference(names: Mapping[str, str]) -> str | None:
    """Return a sentence about the first private name that jax lacks, or has with other parameters."""
    for name, parameters in names.items():
        if list_parameters(name) != parameters:
            return (
                f"jax {jax.__version__} has no {name}({parameters}), which tests/suite/jax_patches.py "
                f"patches in jax {VERSIONS}: the suite runs without this patch, more slowly"
            )
    return None


def list_parameters(name: str) -> str | None:
    """Return the names of a function's parameters; None if there is no such function."""
    with suppress(ImportError, AttributeError):
        return ", ".join(inspect.signature(resolve_name(name)).parameters)
    return None
