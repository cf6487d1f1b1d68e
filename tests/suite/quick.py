"""Settings of a process in which small programs compile quickly: of each worker, and of what tests start.

Importing this module sets them. The users' settings hold in modules that are marked `as_served`.
"""

import copy
import gc
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
HOME = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "duetto"
# Shared by all clones and by the tests' subprocesses: a second run neither traces nor compiles what the first
# did.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HOME / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the suite's time was LLVM's: only tests of bits and of compiled programs ask for it
# (`optimisations`).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

gc.set_threshold(100_000, 50, 100)  # imports and traces make millions of objects that last

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import config, install_import_hook
from suite import jax_patches
from suite.strict import STRICT

# ------------------------------------------------------------ annotations

# Annotations of these packages are checked, shapes among them, in tests of arrays; users' runs do not pay for
# it.
CHECKED = (
    "model",
    "kvcache",
    "sampling",
    "serve.runtime.steps",
    "serve.runtime.compiled",
    "serve.runtime.equal_bits",
    "serve.engine.speculation",
)
JAXTYPED = jaxtyping.jaxtyped
ALL_IMPORTED: list[bool] = []  # not empty while tests run


def decorate_checked(*, typechecker: Any) -> Callable[..., Any]:
    """Return the decorator of functions that are checked. A function that a test without checks makes inside
    another stays plain."""

    def decorate(function: Any) -> Any:
        is_plain = ALL_IMPORTED and config.jaxtyping_disable and "<locals>" in function.__qualname__
        return function if is_plain else JAXTYPED(function, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = decorate_checked
install_import_hook([f"duetto.{name}" for name in CHECKED], "annotations.check")
config.update("jaxtyping_disable", True)

from duetto.model import tree
from duetto.serve.engine.startup import start
from duetto.serve.host.identity import gather_facts
from duetto.serve.kv.offload import page_finder, realm
from duetto.serve.llm import llm
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled import lowering as lowering_module
from duetto.serve.runtime.compiled.lowering import LocalLowering, ProgramLowering
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.equal_bits import classes

# ------------------------------------------------------------ jax

for name, value in STRICT.items():
    jax.config.update(name.lower(), value)

COMPILED_FROM = executable_cache.compile_part


def compile_storable(*arguments: Any) -> tuple[Any, bool]:
    """Compile a program as `executable_cache.compile_part` does. One from jax's cache can be stored too."""
    compiled, is_cached = COMPILED_FROM(*arguments)
    if is_cached:
        jax_patches.keep_bytes(compiled.runtime_executable())
    return compiled, False


jax_patches.apply_patches()
if jax_patches.patch_serialization not in jax_patches.DIFFERENCES:
    executable_cache.compile_part = compile_storable


def pass_flags_to_subprocesses() -> None:
    """Let processes that tests start compile quickly too; XLA has read this one's flags by now."""
    if jax_patches.has_older_emitters() and jax_patches.patch_compile_options not in jax_patches.DIFFERENCES:
        flags = [f"--{name}={int(value)}" for name, value in jax_patches.OLDER_EMITTERS.items()]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def prepare_process() -> None:
    """Prepare for tests, once their files are imported."""
    pass_flags_to_subprocesses()
    gc.freeze()  # each look of the collector through what was imported would take longer than the one before
    ALL_IMPORTED.append(True)


# ------------------------------------------------------------ weights, by numpy

# What looks at weights, and takes a program or two for each shape of them.
ON_DEVICES = {
    "all_finite": tree.is_all_finite,
    "digest": realm.array_digest,
    "fingerprint": classes.hash_param_rows,
}


def all_finite(x: Any) -> bool:
    """Compute `tree.is_all_finite` by numpy."""
    return bool(np.isfinite(np.asarray(x)).all())


def digest(x: Any) -> np.ndarray:
    """Compute `realm.array_digest` by numpy."""
    numbers = np.atleast_1d(np.asarray(x))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = numbers.view(f"uint{8 * numbers.itemsize}").astype(np.uint32)
    else:
        bits = numbers.astype(np.int32).astype(np.uint32)
    place = np.arange(bits.size, dtype=np.uint32).reshape(bits.shape)
    lanes = np.array(realm.HASH_MULTIPLIERS, np.uint32)
    sums = [mix_bits(bits ^ mix_bits(place * lane + lane)).sum(dtype=np.uint32) for lane in lanes]
    return np.array(sums, np.uint32)


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply the 32-bit finalizer of MurmurHash3, as on devices."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fingerprint(params: Any) -> str:
    """Compute `classes.hash_param_rows` by numpy."""
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        content.update(np.asarray(leaf)[(0,) * max(leaf.ndim - 1, 0)].tobytes())
    return content.hexdigest()


tree.is_all_finite, realm.array_digest, classes.hash_param_rows = all_finite, digest, fingerprint

# ------------------------------------------------------------ engines

MAY_SERVE_EARLY = start.may_serve_early
# Which programs serve a test is to follow from the test: `early` has engines that serve while they compile.
start.may_serve_early = lambda *_: False
llm.trim_heap = lambda: None  # memory that the next engine takes again
# Whether pages are fetched or computed is to follow from the test, not from when a machine brings them.
page_finder.FETCH_PATIENCE = 4.0, 600.0

executable_cache.can_create_folder(
    Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "oracle"
)  # made for this user alone

# ------------------------------------------------------------ programs that engines share

MAX_MAPPINGS = 20_000  # Linux allows a process 65,530; each loaded program takes some
MAX_TABLES, MAX_LOWERED = 4, 64  # tables of programs; lowered programs, with what they compile to
TABLES: OrderedDict[Any, ProgramTable] = OrderedDict()
LOWERED: OrderedDict[str, Any] = OrderedDict()
# Methods that lower small programs, and what those change.
SMALL = {
    "lower_slot_assignment": "slots",
    "lower_history_load": "slots",
    "lower_mask_load": "slots",
    "lower_slots": "slots",
    "lower_cache": "cache",
}
LOAD, COMPILE = executable_cache.load_program, executable_cache.compile_and_store


def release_programs() -> None:
    """Forget compiled programs where the process has mapped many."""
    try:
        count = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # no Linux
        return
    if count > MAX_MAPPINGS:
        TABLES.clear()
        LOWERED.clear()
        jax.clear_caches()
        gc.collect()


def share_programs(lowering: ProgramLowering, shapes, first=None, *more) -> ProgramTable:
    """Construct a table as `ProgramTable` does, by copying one of the same arguments and settings, if it is
    among the latest."""
    is_local = isinstance(lowering, LocalLowering)
    if not is_local or first is not None and set(first) < set(shapes):
        return ProgramTable(lowering, shapes, first, *more)
    phases, sizes = lowering.phases, lowering.sizes
    leaves, structure = jax.tree.flatten(lowering.abstract_arguments.params)
    where = {repr(executable_cache.describe_sharding(leaf.sharding)) for leaf in leaves}
    arguments = repr((phases, structure, [(x.shape, x.dtype) for x in leaves], where, sizes, tuple(shapes)))
    (device, *_) = leaves[0].sharding.device_set
    key = (
        arguments,
        repr(gather_facts("program", device)),
        executable_cache.program_folder(),
        lowering_module.is_decode_split,
        more,
    )
    if key in TABLES:
        TABLES[key].are_all_stored = True  # the classes that were found for it are those of the copies
        TABLES.move_to_end(key)
    else:
        TABLES[key] = ProgramTable(lowering, shapes, first, *more)
    table = copy_table(TABLES[key])
    if len(TABLES) > MAX_TABLES:
        TABLES.popitem(last=False)
    return table


def copy_table(programs: ProgramTable) -> ProgramTable:
    """Copy a table of programs, to which an engine may add."""
    table = copy.copy(programs)
    table.steps, table._keys = dict(table.steps), dict(table._keys)
    table._compiled, table._compiled_at = dict(table._compiled), dict(table._compiled_at)
    return table


class LoweredOnce:
    """A lowered program that is compiled once, and stored if it has a key, or what it is compiled to."""

    def __init__(self, lowered: Any, compiled: Any = None, key: str | None = None):
        self._lowered, self._compiled, self._key = lowered, compiled, key

    def compile(self, compiler_options: Any = None) -> Any:
        if self._compiled is None:
            self._compiled = COMPILE(self._key, self._lowered, compiler_options)
        return self._compiled


def lower_steps_once(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that lowers a shape of a `ProgramTable`, or takes what a table of this process, or an
    earlier run, has from the same arguments."""

    def lower_or_take(programs: ProgramTable, shape: Any) -> Any:
        key = programs._program_key(shape)
        tables = [table for table in TABLES.values() if key is not None and table._keys.get(shape) == key]
        if tables:
            return LoweredOnce(None, tables[0]._compiled[shape])
        return remember_lowered(key, lambda: load_or_lower(programs, shape, key))

    def load_or_lower(programs: ProgramTable, shape: Any, key: str | None) -> LoweredOnce:
        (device, *_) = programs.abstract_arguments.replicated_sharding.device_set
        compiled = LOAD(key, device, programs.lowering.join_parts)
        return LoweredOnce(lower(programs, shape) if compiled is None else None, compiled, key)

    return lower_or_take


def lower_small_once(lower: Callable[[LocalLowering], Any], name: str) -> Callable[[LocalLowering], Any]:
    """Return a method that lowers a small program, or takes what was lowered for slots, or a cache, of the
    same shapes."""

    def lower_or_take(lowering: LocalLowering) -> Any:
        like, sizes = lowering.abstract_arguments, lowering.sizes
        leaves, structure = jax.tree.flatten(getattr(like, name))
        arrays = [(x.shape, x.dtype, executable_cache.describe_sharding(x.sharding)) for x in leaves]
        facts = lower.__name__, structure, arrays, sizes.shards, sizes.max_model_len
        key = repr((*facts, gather_facts("program", jax.devices()[0])))
        return remember_lowered(key, lambda: LoweredOnce(lower(lowering)))

    return lower_or_take


def remember_lowered(key: str | None, lower: Callable[[], Any]) -> Any:
    """Return what was lowered under a key, and is among the latest, or lower it."""
    if key is None:
        return lower()
    lowered = LOWERED.pop(key) if key in LOWERED else lower()
    LOWERED[key] = lowered  # the latest is the last
    if len(LOWERED) > MAX_LOWERED:
        LOWERED.popitem(last=False)
    return lowered
