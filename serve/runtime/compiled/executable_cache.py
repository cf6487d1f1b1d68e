"""Ahead-of-time compiled programs on disk, found without tracing: a second start neither traces, lowers nor
compiles them.

jax's own compilation cache is keyed by the lowered program, and lowering a deep model takes seconds. The key
here is the source that a program is traced from, the versions, the device, the flags, and the arguments'
shapes. The files lie in a subfolder of jax's cache (`jax_compilation_cache_dir`) and may be deleted at any
time. A program is read by `pickle`, as jax writes it, after `BlobStore` has checked owner and checksum.
"""

import hashlib
import os
import pickle
import re
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

from ....user_folders import refusal
from ...host import progress
from ...host.blob_store import BlobFormat, BlobStore, DamagedBlobError
from ...host.devices import processor
from ...host.streams import warn
from ..steps.phases import Phases

LIBRARY = ("cpu_kernels", "model", "kvcache", "sampling", "serve")
# Modules that trace, lower and compare steps, hashed into the keys of programs and measurements. An
# edit elsewhere compiles nothing anew.
TRACED = (
    "cpu_kernels",
    "model",
    "kvcache",
    "sampling",
    "serve.engine.speculation.draft_steps",
    "serve.engine.speculation.guessers",
    "serve.engine.startup.kernel_cases",
    "serve.engine.startup.kernel_checks",
    "serve.engine.startup.trial",
    "serve.runtime.compiled",
    "serve.runtime.equal_bits",
    "serve.runtime.pipeline",
    "serve.runtime.steps",
)
PROGRAMS = BlobFormat(b"duetto kept 1\n", ".", re.compile("[^.].*"), durable=True)
LIMIT = 7 << 29  # bytes of a folder: the programs of a hundred models and sizes
GRACE = 600  # seconds after its last use in which no start evicts a file: another start may be reading it
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Raised for a program that cannot be serialised: one with custom partitioning holds functions of Python.
UNSTORABLE = (
    ValueError,
    TypeError,
    AttributeError,
    NotImplementedError,
    pickle.PicklingError,
    jax.errors.JaxRuntimeError,
)
THREAD = threading.local()
T = TypeVar("T")
K = TypeVar("K")


@runtime_checkable
class Lowered(Protocol):
    """A lowered program: jax's own, or several that are joined to one."""

    def compile(self, *, compiler_options: Any = None) -> Any: ...


@dataclass(frozen=True)
class JoinedPrograms:
    """Lowered programs whose compiled forms `join` makes into one."""

    parts: Sequence[Lowered]
    join: Callable[..., Any]

    def compile(self, *, compiler_options: Any = None) -> Any:
        return self.join(*(part.compile(compiler_options=compiler_options) for part in self.parts))


class Spent:
    """Seconds that tracing and compiling took, by program of a table with a key. `mean` is stored for later
    starts, and is 0 if no start has compiled."""

    def __init__(self, key: str | None):
        self.seconds: dict[Any, float] = {}
        self._key = combined([key], "seconds of compiling")
        self._earlier = read(self._key, float) or 0.0

    @contextmanager
    def on(self, program: Any) -> Iterator[None]:
        """Add the seconds of the block to a program's."""
        begin = time.perf_counter()
        yield
        self.seconds[program] = self.seconds.get(program, 0.0) + time.perf_counter() - begin

    def keep(self, together: float | None = None) -> None:
        """Store the mean; `together` are the seconds of all programs, if they were compiled concurrently."""
        if self.seconds and together is not None:
            self.seconds = dict.fromkeys(self.seconds, together / len(self.seconds))
        if self.seconds:
            write(self._key, self.mean)

    @property
    def mean(self) -> float:
        found = list(self.seconds.values())
        return sum(found) / len(found) if found else self._earlier


def usable(folder: Path) -> bool:
    """Create a folder for programs; return False, with a warning, if it cannot hold any."""
    if reason := refusal(folder):
        warn(f"compiled programs are not kept in {folder}: {reason}")
    return not reason


def folder() -> Path | None:
    """Return the folder of stored programs; None if jax's cache is off or remote, or others could write
    there."""
    place = jax.config.values["jax_compilation_cache_dir"]
    if not place or "://" in place:
        return None
    own = Path(place) / "duetto"
    return own if usable(own) else None


def key(
    phases: Phases,
    phase: str,
    arguments: Any,
    refused: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> str | None:
    """Return the key of a phase's program with these abstract arguments, traced without the kernels that are
    refused and compiled with XLA's options; None on devices of several processes, and for phases whose code
    is not in the hash of `TRACED`."""
    places = [leaf.sharding for leaf in jax.tree.leaves(arguments)]
    is_here = all(place.is_fully_addressable for place in places)
    if not is_here or not all(map(is_traced, [phases, getattr(phases, "guesser", None)])):
        return None
    (device, *_) = places[0].device_set
    facts = (
        *environment(device),
        *described(phases, phase, arguments),
        *refused,
        *sorted((options or {}).items()),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def is_traced(part: object) -> bool:
    """Return whether a part of the phases, or None, is of a module of `TRACED`."""
    module = type(part).__module__.removeprefix("duetto.")
    return part is None or any(module == name or module.startswith(f"{name}.") for name in TRACED)


def described(phases: Phases, phase: str, arguments: Any) -> tuple[Any, ...]:
    """Return what decides a phase's program besides the environment."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype), *placed(leaf.sharding)) for leaf in leaves]
    return phase, repr(phases), str(structure), shapes


def placed(place: jax.sharding.Sharding) -> tuple[str, list[int]]:
    """Return what decides a program of a sharding: how it divides an array, and its devices in their
    order."""
    mesh = place.mesh if isinstance(place, jax.sharding.NamedSharding) else None
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else place.device_set
    return str(place), [device.id for device in devices]


def environment(device: Any) -> tuple[Any, ...]:
    """Return what decides a result's bits on a device, besides the program and its arguments."""
    kernels = find_spec("absl") is not None  # which some of jax's kernels need
    versions = jax.__version__, version("jaxlib"), device.client.platform_version, kernels
    machine = device.device_kind, processor(), cores(), [os.environ.get(name) for name in FLAGS]
    settings = sorted((name, str(value)) for name, value in jax.config.values.items() if "cache" not in name)
    return traced(), versions, machine, settings


@cache
def traced() -> str:
    """Return a hash of the code that programs are traced from, as it was when this module was imported."""
    return hash_of_traced()


def hash_of_traced() -> str:
    """Return the hash of the code as it is now."""
    return sources_hash(place for name in TRACED for place in places(name))


@cache
def source() -> str:
    """Return a hash of the code that decides tokens, text and scheduling included."""
    return sources_hash(place for name in LIBRARY for place in places(name))


def places(name: str) -> list[str]:
    """Return the folder of a package of this library, or the file of a module."""
    found = find_spec(f"duetto.{name}")
    assert found is not None and found.origin is not None
    return list(found.submodule_search_locations or [found.origin])


def sources_hash(places: Iterable[str | Path]) -> str:
    """Return a hash of the names and contents of Python files, and of those in folders."""
    found = hashlib.sha256()
    for place in map(Path, places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            found.update(f"{path.relative_to(place.parent)} ".encode() + path.read_bytes())
    return found.hexdigest()


def cores() -> int | None:
    """Return the number of cores that the process may use: XLA divides products among them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def combined(keys: Iterable[str | None], *facts: Any) -> str | None:
    """Return one key of several keys and other facts; None if one of the keys is None."""
    keys = sorted(keys, key=str)
    return None if None in keys else hashlib.sha256(repr((keys, facts)).encode()).hexdigest()


def read(key: str | None, kind: type[T] | GenericAlias) -> T | None:
    """Return the record of a type, such as dict[str, bytes], that is stored under a key, or None."""
    content = read_bytes(key)
    try:
        return msgspec.msgpack.decode(content, type=kind) if content else None
    except msgspec.DecodeError:  # of another shape than today's
        return None


def write(key: str | None, value: Any) -> None:
    """Store a record for the next start; nothing is stored if the folder cannot be written."""
    write_bytes(key, msgspec.msgpack.encode(value))


def read_bytes(key: str | None) -> bytes | None:
    """Return what is stored under a key, or None; b"" in place of a file that was damaged."""
    if key is None or (place := folder()) is None:
        return None
    blobs = BlobStore(place, PROGRAMS, LIMIT)
    try:
        return blobs.read(key)
    except DamagedBlobError:
        warn(f"{blobs.path(key)} was damaged: it is deleted and made anew")
        write_bytes(key, b"")
        return b""
    except OSError:  # most often there is none
        return None


def write_bytes(key: str | None, content: bytes) -> None:
    if key is not None and (place := folder()) is not None:
        blobs = BlobStore(place, PROGRAMS, LIMIT, GRACE)
        with suppress(OSError):
            blobs.refresh()
            blobs.write(key, content)


def alone(program: T) -> T:
    """Join a program that has one part."""
    return program


def load(key: str | None, device: Any, join: Callable[..., Any] = alone) -> Any:
    """Return the program stored under a key, whose parts `join` makes into one, or None. It is loaded on its
    own devices, of the client of `device`."""
    content = read_bytes(key)
    if not content:
        return None
    try:
        return join(*(loaded(device.client, *part) for part in pickle.loads(content)))
    except Exception:  # noqa: BLE001 - a runtime that cannot use it says so in its own way
        return None


def loaded(client: Any, ids: Sequence[int], *program: Any) -> Any:
    """Load a part of a program on the devices for which it was compiled."""
    devices = {device.id: device for device in client.local_devices()}
    own = [devices[i] for i in ids]
    return serialize_executable.deserialize_and_load(*program, backend=client, execution_devices=own)


def stored(compiled: Any) -> tuple[Any, ...]:
    """Return a part of a program as it is pickled: the numbers of its devices in their order first."""
    ids = [device.id for device in compiled.runtime_executable().local_devices()]
    return ids, *serialize_executable.serialize(compiled)


def load_all(
    pool: ThreadPoolExecutor,
    keys: Mapping[K, str | None],
    everywhere: jax.sharding.Sharding,
    join: Callable[..., Any],
) -> dict[K, Any]:
    """Return the programs stored under keys, joined of their parts; None for each that is not stored."""
    (device, *_) = everywhere.device_set
    with progress.stage("reading kept programs", len(keys), progress.PATIENCE) as done:
        found = pool.map(lambda key: done(load(key, device, join)), keys.values())
        return dict(zip(keys, found, strict=True))


def compile(key: str | None, lowered: Lowered, options: Mapping[str, str | bool] | None = None) -> Any:
    """Compile a program with these options of XLA, and store its parts if the devices' programs can be
    serialised.

    On a CPU, a program that came from jax's cache cannot be serialised again. It is compiled once more if its
    stored file was damaged.
    """
    whole = lowered if isinstance(lowered, JoinedPrograms) else JoinedPrograms([lowered], alone)
    parts = [compiled_from(part, options) for part in whole.parts]
    if any(known for _, known in parts) and read_bytes(key) == b"":
        unlike_any = {"xla_gpu_dump_autotune_logs_to": str(time.time_ns())}  # without effect on a CPU
        with suppress(ValueError, jax.errors.JaxRuntimeError):  # of an XLA that lacks the option
            parts = [compiled_from(part, unlike_any) for part in whole.parts]
    compiled, known = zip(*parts, strict=True)
    if folder() is not None and key is not None and not any(known) and hash_of_traced() == traced():
        with suppress(*UNSTORABLE):
            write_bytes(key, pickle.dumps(list(map(stored, compiled))))
    return whole.join(*compiled)


def compiled_from(lowered: Lowered, options: Mapping[str, str | bool] | None = None) -> tuple[Any, bool]:
    """Return the compiled program, and whether it is a CPU program from jax's cache."""
    watch_hits()
    THREAD.hits = 0
    compiled = lowered.compile(compiler_options=options)
    return compiled, bool(THREAD.hits) and jax.default_backend() == "cpu"


@cache
def watch_hits() -> None:
    """Count the hits of jax's cache by thread."""

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            THREAD.hits = getattr(THREAD, "hits", 0) + 1

    jax.monitoring.register_event_listener(on_event)


traced()  # later edits are not in the code that this process runs
