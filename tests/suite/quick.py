"""Settings of a process in which small programs compile quickly: of each worker, and of what tests start.

Importing this module sets them. The users' settings hold in modules that are marked `as_served`.
"""

import copy
import gc
import hashlib
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from inspect import Signature
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
from suite.strict import STRICT

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
DECORATOR: Any = import_module("jaxtyping._decorator")
WITH_SIGNATURE, CHECK = DECORATOR._make_fn_with_signature, DECORATOR._apply_typechecker


def made_once(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives again what it has made under the same key; None is no key."""
    made: dict[Any, Any] = {}

    def found(*arguments: Any, **named: Any) -> Any:
        own = key(*arguments, **named)
        if own is None:
            return make(*arguments, **named)
        if own not in made:
            made[own] = make(*arguments, **named)
        return made[own]

    return found


def signature_key(name: str, qualname: str, module: str, signature: Signature, output: bool) -> Any:
    """What decides how the calls of a function are checked; None if it has default values, which are its
    own."""
    has_defaults = any(x.default is not x.empty for x in signature.parameters.values())
    return None if has_defaults else (module, qualname, output, str(signature))


# A function inside another is decorated at each call of the outer one: a quarter of the time of tracing.
DECORATOR._make_fn_with_signature = made_once(WITH_SIGNATURE, signature_key)
DECORATOR._apply_typechecker = made_once(CHECK, lambda typechecker, made: (typechecker, made))


def typed(*, typechecker: Any) -> Callable[..., Any]:
    """The decorator of functions that are checked. A function that a test without checks makes inside another
    stays plain."""

    def decorated(function: Any) -> Any:
        plain = ALL_IMPORTED and config.jaxtyping_disable and "<locals>" in function.__qualname__
        return function if plain else JAXTYPED(function, typechecker=typechecker)

    return decorated


JAXTYPED, jaxtyping.jaxtyped = jaxtyping.jaxtyped, typed
ALL_IMPORTED: list[bool] = []  # not empty while tests run
install_import_hook([f"duetto.{name}" for name in CHECKED], "annotations.check")
config.update("jaxtyping_disable", True)

from duetto.model import tree
from duetto.serve.engine.startup import start
from duetto.serve.kv.offload import realm
from duetto.serve.llm import llm
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.compile import Programs
from duetto.serve.runtime.compiled.futures import DeferredSampling
from duetto.serve.runtime.equal_bits import classes

for name, value in STRICT.items():
    jax.config.update(name.lower(), value)
# The emitters before today's compile a step in half the time, and so small a program gains nothing from two
# threads.
OLDER = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
COMPILER: Any = import_module("jax._src.compiler")  # nothing public reaches a jitted function's options
OPTIONS = COMPILER.get_compile_options


def quick_options(*arguments: Any, env_options_overrides: dict[str, Any] | None = None, **others: Any) -> Any:
    """Options to compile with the older emitters, unless a program is to be as users' are."""
    quickly = OLDER if jax.config.values["jax_disable_most_optimizations"] else None
    return OPTIONS(*arguments, env_options_overrides=env_options_overrides or quickly, **others)


with suppress(jax.errors.JaxRuntimeError):  # newer versions have one kind only
    jax.jit(lambda: 0).lower().compile(OLDER)
    COMPILER.get_compile_options = quick_options

CACHE: Any = import_module("jax._src.compilation_cache")
if CACHE.zstd is None and CACHE.zstandard is None:  # zlib takes a third of the time for nearly as few bytes
    CACHE.compress_executable = partial(zlib.compress, level=1)

# A CPU cannot serialise a program that came from jax's cache: it would be traced in every run. It is stored
# with the bytes of that cache.
PICKLER: Any = import_module("jax.experimental.serialize_executable")._JaxPjrtPickler
EXTRACT, PERSISTENT_ID, COMPILED_FROM = (
    CACHE.extract_executable_and_time, PICKLER.persistent_id, executable_cache.compiled_from,
)  # fmt: skip
FROM_CACHE: OrderedDict[int, tuple[Any, bytes]] = OrderedDict()  # the latest executables by id


def extracted(content: bytes) -> tuple[bytes, int]:
    """Take an entry of jax's cache apart, and note the program's bytes."""
    found = EXTRACT(content)
    executable_cache.THREAD.bytes = found[0]
    return found


def compiled_from(*arguments: Any) -> tuple[Any, bool]:
    """Compile a program as `executable_cache.compiled_from` does; any can be stored."""
    compiled, known = COMPILED_FROM(*arguments)
    if known:
        executable = compiled.runtime_executable()
        FROM_CACHE[id(executable)] = executable, executable_cache.THREAD.bytes
        if len(FROM_CACHE) > MOST_LOWERED:
            FROM_CACHE.popitem(last=False)
    return compiled, False


def persistent_id(pickler: Any, part: Any) -> Any:
    found = FROM_CACHE.get(id(part))
    return ("exec", found[1]) if found else PERSISTENT_ID(pickler, part)


CACHE.extract_executable_and_time, executable_cache.compiled_from = extracted, compiled_from
PICKLER.persistent_id = persistent_id

# Making a context of MLIR, and releasing it, takes half of the time of a small program.
MLIR: Any = import_module("jax._src.interpreters.mlir")
PJIT: Any = import_module("jax._src.pjit")
MAKE_CONTEXT, CALLED, AHEAD = MLIR.make_ir_context, PJIT._resolve_and_lower, jax.stages.Traced.lower
OF_A_CONTEXT = 64  # programs


class Contexts(threading.local):
    """Contexts of a thread's programs: those that it compiles as it calls them share one. Others have their
    own: another thread may compile what is lowered ahead, and XLA calls back for parts of programs."""

    is_ahead, is_shared, count, shared = False, False, 0, None

    def make(self) -> Any:
        if not self.is_shared:
            return MAKE_CONTEXT()
        if self.count % OF_A_CONTEXT == 0:
            self.shared = MAKE_CONTEXT()
        self.count += 1
        return self.shared

    def lower_ahead(self, *arguments: Any, **named: Any) -> Any:
        before, self.is_ahead = self.is_ahead, True
        try:
            return AHEAD(*arguments, **named)
        finally:
            self.is_ahead = before

    def lower_called(self, *arguments: Any, **named: Any) -> Any:
        before, self.is_shared = self.is_shared, not self.is_ahead
        try:
            return CALLED(*arguments, **named)
        finally:
            self.is_shared = before


CONTEXTS = Contexts()
MLIR.make_ir_context, PJIT._resolve_and_lower = CONTEXTS.make, CONTEXTS.lower_called
jax.stages.Traced.lower = lambda *arguments, **named: CONTEXTS.lower_ahead(*arguments, **named)

# What looks at weights, and takes a program or two for each shape of them.
ON_DEVICES = {"all_finite": tree.all_finite, "digest": realm.digest, "fingerprint": classes.fingerprint}


def all_finite(x: Any) -> bool:
    """The same as `tree.all_finite` by numpy."""
    return bool(np.isfinite(np.asarray(x)).all())


def digest(x: Any) -> np.ndarray:
    """The same as `realm.digest` by numpy."""
    numbers = np.atleast_1d(np.asarray(x))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = numbers.view(f"uint{8 * numbers.itemsize}").astype(np.uint32)
    else:
        bits = numbers.astype(np.int32).astype(np.uint32)
    place = np.arange(bits.size, dtype=np.uint32).reshape(bits.shape)
    lanes = np.array(realm.LANES, np.uint32)
    sums = [mixed(bits ^ mixed(place * lane + lane)).sum(dtype=np.uint32) for lane in lanes]
    return np.array(sums, np.uint32)


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fingerprint(params: Any) -> str:
    """The same as `classes.fingerprint` by numpy."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf)[(0,) * max(leaf.ndim - 1, 0)].tobytes())
    return found.hexdigest()


tree.all_finite, realm.digest, classes.fingerprint = all_finite, digest, fingerprint

MAY_COMPILE_LATE = start.may_compile_late
# Which programs serve a test is to follow from the test: `early` has engines that serve while they compile.
start.may_compile_late = lambda *_: False
llm.give_back = lambda: None  # memory that the next engine takes again

executable_cache.usable(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "oracle")  # made for this user alone


def of_subprocesses() -> None:
    """Let processes that tests start compile quickly too; this one has read its flags by now."""
    if jax.devices() and COMPILER.get_compile_options is quick_options:
        flags = [f"--{name}={int(value)}" for name, value in OLDER.items()]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def begin() -> None:
    """Prepare for tests, once their files are imported."""
    of_subprocesses()
    gc.freeze()  # each look of the collector through what was imported would take longer than the one before
    ALL_IMPORTED.append(True)


MOST_MAPPINGS = 20_000  # Linux allows a process 65,530; each loaded program takes some
LATEST = 4  # tables of programs that are shared
MADE: OrderedDict[Any, Programs] = OrderedDict()


def release_programs() -> None:
    """Forget compiled programs where the process has mapped many."""
    try:
        count = Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # no Linux
        return
    if count > MOST_MAPPINGS:
        MADE.clear()
        LOWERED.clear()
        jax.clear_caches()
        gc.collect()


def shared(make: type[Programs]) -> Callable[..., Programs]:
    """A constructor of programs that copies those it has made from the same arguments under the same
    settings, the latest ones."""

    def programs(phases, params, sizes, shapes, first=None, *more) -> Programs:
        if first is not None and set(first) < set(shapes):
            return make(phases, params, sizes, shapes, first, *more)
        leaves, structure = jax.tree.flatten(params)
        where = {repr(executable_cache.placed(leaf.sharding)) for leaf in leaves}
        key = repr((phases, structure, [(x.shape, x.dtype) for x in leaves], where, sizes, tuple(shapes)))
        (device, *_) = leaves[0].sharding.device_set
        key = key, repr(executable_cache.environment(device)), executable_cache.folder(), more
        if key in MADE:
            MADE[key].loaded = True  # the classes that were found for it are those of the copies
            MADE.move_to_end(key)
        else:
            MADE[key] = make(phases, params, sizes, shapes, first, *more)
        found = independent(MADE[key])
        if len(MADE) > LATEST:
            MADE.popitem(last=False)
        return found

    return programs


LOWERED: OrderedDict[str, Any] = OrderedDict()
MOST_LOWERED = 64  # programs, with what they compile to
# Methods that lower the small programs of a table, and what those change.
SMALL = {"_lower_seat": "slots", "_lower_loads": "slots", "_lower_slots": "slots", "_lower_cache": "cache"}


LOAD, COMPILE = executable_cache.load, executable_cache.compile


class LoweredOnce:
    """A lowered program that is compiled once, and stored if it has a key, or what it is compiled to."""

    def __init__(self, lowered: Any, compiled: Any = None, key: str | None = None):
        self._lowered, self._compiled, self._key = lowered, compiled, key

    def compile(self, compiler_options: Any = None) -> Any:
        if self._compiled is None:
            self._compiled = COMPILE(self._key, self._lowered, compiler_options)
        return self._compiled


def lowered_once(lower: Callable[..., Any]) -> Callable[..., Any]:
    """A method that lowers a shape of `Programs`, and returns what a table of this process, or an earlier
    run, has from the same arguments."""

    def lowered(programs: Programs, shape: Any) -> Any:
        key = programs._key(shape)
        tables = [table for table in MADE.values() if key is not None and table._keys.get(shape) == key]
        if tables:
            return LoweredOnce(None, tables[0].steps[shape])
        return kept(key, lambda: stored(programs, shape, key))

    def stored(programs: Programs, shape: Any, key: str | None) -> LoweredOnce:
        join = DeferredSampling if shape.phase == "deferred" else programs._join
        found = LOAD(key, next(iter(programs._devices)), join)
        return LoweredOnce(lower(programs, shape) if found is None else None, found, key)

    return lowered


def small_once(lower: Callable[[Programs], Any], name: str) -> Callable[[Programs], Any]:
    """A method that lowers small programs of a table, and returns what was lowered for slots, or a cache, of
    the same shapes."""

    def lowered(programs: Programs) -> Any:
        like, sizes = programs.like, programs.sizes
        leaves, structure = jax.tree.flatten(getattr(like, name))
        facts = lower.__name__, structure, list(map(facts_of, leaves)), sizes.shards, sizes.max_model_len
        key = repr((*facts, programs.refused, executable_cache.environment(jax.devices()[0])))
        return kept(key, lambda: once(lower(programs)))

    return lowered


def once(found: Any) -> Any:
    """One lowered program, or several, that are compiled once."""
    return [LoweredOnce(one) for one in found] if isinstance(found, list) else LoweredOnce(found)


def facts_of(x: Any) -> tuple[Any, ...]:
    """What programs depend on of an array, or of its shape."""
    return x.shape, x.dtype, executable_cache.placed(x.sharding)


def kept(key: str | None, make: Callable[[], Any]) -> Any:
    """What was made under a key, one of the latest."""
    if key is None:
        return make()
    found = LOWERED.pop(key) if key in LOWERED else make()
    LOWERED[key] = found  # the latest is the last
    if len(LOWERED) > MOST_LOWERED:
        LOWERED.popitem(last=False)
    return found


def independent(programs: Programs) -> Programs:
    """Copy a table of programs, to which an engine may add."""
    own = copy.copy(programs)
    own.steps, own.ready, own.missing = dict(own.steps), dict(own.ready), list(own.missing)
    own._keys = dict(own._keys)
    return own


SHARED = shared(Programs)
