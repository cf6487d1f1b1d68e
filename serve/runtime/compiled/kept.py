"""Compiled programs on disk that are found without tracing: a second start neither traces, lowers nor
compiles them.

jax's own compilation cache is keyed by the lowered program, and making that takes seconds for a deep model.
The key here is what a program follows from: the source that it is traced from, the versions, the device, the
flags, and the arguments' shapes. The files lie in a folder of jax's cache (`jax_compilation_cache_dir`) and
may be deleted at any time. A program is read by `pickle`, as jax writes it, but only after `store` has found
that nobody else can have written it.
"""

import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import GenericAlias
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import msgspec
from jax.experimental import serialize_executable

from ...host import progress, store
from ...host.devices import processor
from ..steps.phases import Phases

LIBRARY = ("model", "kvcache", "sampling", "serve")
# What kept programs and kept measurements follow from: where steps are traced, lowered and compared. An edit
# elsewhere compiles nothing anew.
TRACED = (
    "model",
    "kvcache",
    "sampling",
    "serve.engine.speculation.draft_steps",
    "serve.engine.speculation.guessers",
    "serve.engine.startup.trial",
    "serve.runtime.compiled",
    "serve.runtime.equal_bits",
    "serve.runtime.pipeline",
    "serve.runtime.steps",
)
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
THREAD = threading.local()
T = TypeVar("T")
K = TypeVar("K")


@runtime_checkable
class Lowered(Protocol):
    """What compiles to a program: jax's own, or several that make one."""

    def compile(self, *, compiler_options: Any = None) -> Any: ...


@dataclass(frozen=True)
class JoinedPrograms:
    """Several programs that make one when they are compiled."""

    parts: Sequence[Lowered]
    join: Callable[..., Any]

    def compile(self, *, compiler_options: Any = None) -> Any:
        return self.join(*(part.compile(compiler_options=compiler_options) for part in self.parts))


class Spent:
    """Seconds that tracing and compiling took by program, of a table with a key. Their mean is known to later
    starts, 0 where no start has compiled."""

    def __init__(self, key: str | None):
        self.seconds: dict[Any, float] = {}
        self._key = combined([key], "seconds of compiling")
        self._earlier = read(self._key, float) or 0.0

    @contextmanager
    def on(self, program: Any) -> Iterator[None]:
        """Count the time spent inside for a program."""
        begin = time.perf_counter()
        yield
        self.seconds[program] = self.seconds.get(program, 0.0) + time.perf_counter() - begin

    def keep(self, together: float | None = None) -> None:
        """Tell later starts; `together` are the seconds of all that were compiled beside each other."""
        if self.seconds and together is not None:
            self.seconds = dict.fromkeys(self.seconds, together / len(self.seconds))
        if self.seconds:
            write(self._key, self.mean)

    @property
    def mean(self) -> float:
        found = list(self.seconds.values())
        return sum(found) / len(found) if found else self._earlier


def folder() -> Path | None:
    """Where programs are stored; None where jax's cache is off or remote, or others could write there."""
    place = jax.config.values["jax_compilation_cache_dir"]
    if not place or "://" in place:
        return None
    own = Path(place) / "duetto"
    return own if store.usable(own) else None


def key(phases: Phases, phase: str, arguments: Any) -> str | None:
    """What the program of a phase with these abstract arguments is kept under; None on several devices, whose
    order matters, and where the hash of `TRACED` does not hold the phases' code."""
    devices = set().union(*(leaf.sharding.device_set for leaf in jax.tree.leaves(arguments)))
    if len(devices) > 1 or not all(map(is_traced, [phases, getattr(phases, "guesser", None)])):
        return None
    (device,) = devices
    facts = *environment(device), *described(phases, phase, arguments)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def is_traced(part: object) -> bool:
    """Whether a part of the phases, if there is one, is of a module of `TRACED`."""
    module = type(part).__module__.removeprefix("duetto.")
    return part is None or any(module == name or module.startswith(f"{name}.") for name in TRACED)


def described(phases: Phases, phase: str, arguments: Any) -> tuple[Any, ...]:
    """What the program of a phase follows from beside the environment."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
    return phase, repr(phases), str(structure), shapes


def environment(device: Any) -> tuple[Any, ...]:
    """What the bits of a result on a device follow from, beside the program and what it is given."""
    kernels = find_spec("absl") is not None  # which some of jax's kernels need
    versions = jax.__version__, version("jaxlib"), device.client.platform_version, kernels
    machine = device.device_kind, processor(), cores(), [os.environ.get(name) for name in FLAGS]
    settings = sorted((name, str(value)) for name, value in jax.config.values.items() if "cache" not in name)
    return traced(), versions, machine, settings


@cache
def traced() -> str:
    """A hash of the code that programs are traced from, as it was when this module was imported."""
    return hash_of_traced()


def hash_of_traced() -> str:
    """The same as it is now."""
    return sources_hash(place for name in TRACED for place in places(name))


@cache
def source() -> str:
    """A hash of the code that tokens follow from, text and scheduling included."""
    return sources_hash(place for name in LIBRARY for place in places(name))


def places(name: str) -> list[str]:
    """The folder of a package of this library, or the file of a module."""
    found = find_spec(f"duetto.{name}")
    assert found is not None and found.origin is not None
    return list(found.submodule_search_locations or [found.origin])


def sources_hash(places: Iterable[str | Path]) -> str:
    """A hash of Python files, and of all that are in folders, by their names."""
    found = hashlib.sha256()
    for place in map(Path, places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(f"{path.relative_to(place.parent)} ".encode() + path.read_bytes())
    return found.hexdigest()


def cores() -> int | None:
    """Cores that the process may use: XLA divides products among them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def combined(keys: Iterable[str | None], *facts: Any) -> str | None:
    """One key of several and of what else matters; None if one is."""
    keys = sorted(keys, key=str)
    return None if None in keys else hashlib.sha256(repr((keys, facts)).encode()).hexdigest()


def read(key: str | None, kind: type[T] | GenericAlias) -> T | None:
    """The record of a type, such as dict[str, bytes], that is kept under a key, or None."""
    content = read_bytes(key)
    try:
        return msgspec.msgpack.decode(content, type=kind) if content else None
    except msgspec.DecodeError:  # of another shape than today's
        return None


def write(key: str | None, value: Any) -> None:
    """Keep a record for the next start; where the folder cannot be written, nothing is kept."""
    write_bytes(key, msgspec.msgpack.encode(value))


def read_bytes(key: str | None) -> bytes | None:
    place = folder()
    return None if place is None or key is None else store.read(place, key)


def write_bytes(key: str | None, content: bytes) -> None:
    place = folder()
    if place is not None and key is not None:
        with suppress(OSError):
            store.write(place, key, content)


def load(key: str | None, device: Any) -> Any:
    """The program kept under a key, for a device, or None."""
    content = read_bytes(key)
    if not content:
        return None
    try:
        parts = pickle.loads(content)
        return serialize_executable.deserialize_and_load(
            *parts, backend=device.client, execution_devices=[device]
        )
    except Exception:  # noqa: BLE001 - a runtime that cannot use it says so in its own way
        return None


def load_all(
    pool: ThreadPoolExecutor, keys: Mapping[K, str | None], everywhere: jax.sharding.Sharding
) -> dict[K, Any]:
    """The programs that are kept under keys, None where one is not."""
    (device, *_) = everywhere.device_set
    with progress.stage("reading kept programs", len(keys), progress.PATIENCE) as done:
        found = pool.map(lambda key: done(load(key, device)), keys.values())
        return dict(zip(keys, found, strict=True))


def compile(key: str | None, lowered: Lowered) -> Any:
    """Compile a program, and keep it where the device's programs can be.

    On a CPU one that jax's cache had is not, since it cannot be written a second time; in the place of a
    damaged file it is compiled once more.
    """
    compiled, known = found(lowered)
    if known and read_bytes(key) == b"":
        with suppress(ValueError, jax.errors.JaxRuntimeError):  # of an XLA that lacks the option
            compiled, known = found(lowered, unlike_any())
    if folder() is not None and key is not None and not known and hash_of_traced() == traced():
        with suppress(ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError):
            write_bytes(key, pickle.dumps(serialize_executable.serialize(compiled)))
    return compiled


def found(lowered: Lowered, options: dict[str, str | bool] | None = None) -> tuple[Any, bool]:
    """The compiled program, and whether it is a CPU program from jax's cache."""
    watch_hits()
    THREAD.hits = 0
    compiled = lowered.compile(compiler_options=options)
    return compiled, bool(THREAD.hits) and jax.default_backend() == "cpu"


def unlike_any() -> dict[str, str | bool]:
    """Options that change nothing on a CPU, under which jax's cache has no program."""
    return {"xla_gpu_dump_autotune_logs_to": str(time.time_ns())}


@cache
def watch_hits() -> None:
    """Count what jax's cache finds, by the thread that asks."""

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            THREAD.hits = getattr(THREAD, "hits", 0) + 1

    jax.monitoring.register_event_listener(on_event)


traced()  # what is edited later is not what this process runs
