"""Ahead-of-time compiled programs on disk, found without tracing: a second start does not trace, lower or
compile.

jax's own compilation cache is keyed by the lowered program, and lowering a deep model takes seconds. The key
here is a hash of the source that a program is traced from, the versions, the device, the flags, and the
arguments' shapes. The files are in a subfolder of jax's cache (`jax_compilation_cache_dir`) and may be
deleted at any time. A program is read by `pickle`, as jax writes it, after `BlobStore` has checked owner and
checksum.
"""

import pickle
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import msgspec
from jax.experimental import serialize_executable

from ....user_folders import prepare_private_folder
from ...host import identity, progress
from ...host.blob_store import BlobFormat, BlobStore, DamagedBlobError
from ...host.identity import TRACED_MODULES, gather_facts, hash_facts
from ...host.streams import warn_once
from ..steps.phases import Phases

PROGRAM_FORMAT = BlobFormat(b"duetto kept 1\n", ".", re.compile("[^.].*"), durable=True)
MAX_FOLDER_BYTES = 7 << 29  # bytes of a folder: the programs of a hundred models and sizes
# Seconds since its last use before a file may be evicted: another start may be reading it.
EVICTION_GRACE_SECONDS = 600
# Raised for a program that cannot be serialised, for example because it has custom partitioning in Python.
UNSTORABLE_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    NotImplementedError,
    pickle.PicklingError,
    jax.errors.JaxRuntimeError,
)
THREAD_STATE = threading.local()
T = TypeVar("T")
K = TypeVar("K")


@runtime_checkable
class Lowered(Protocol):
    """Lowered program: one of jax's, or several that are joined to one."""

    def compile(self, *, compiler_options: Any = None) -> Any: ...


@dataclass(frozen=True)
class JoinedPrograms:
    """Lowered programs that form one program.

    parts: the lowered programs.
    join: makes one program of the compiled parts.
    """

    parts: Sequence[Lowered]
    join: Callable[..., Any]

    def compile(self, *, compiler_options: Any = None) -> Any:
        return self.join(*(part.compile(compiler_options=compiler_options) for part in self.parts))


class CompileTimes:
    """Seconds of tracing and compiling, by program of a table with a key.

    seconds: of each program that was compiled.
    mean: seconds per program, stored for later starts; 0 if no start has compiled.
    """

    def __init__(self, key: str | None):
        self.seconds: dict[Any, float] = {}
        self._key = combine_keys([key], "seconds of compiling")
        self._stored_mean = read_record(self._key, float) or 0.0

    @contextmanager
    def measure(self, program: Any) -> Iterator[None]:
        """Add the seconds of the block to the program's."""
        begin = time.perf_counter()
        yield
        self.seconds[program] = self.seconds.get(program, 0.0) + time.perf_counter() - begin

    def store_mean(self, total_seconds: float | None = None) -> None:
        """Store the mean. `total_seconds`: seconds of all programs, if they were compiled concurrently."""
        if self.seconds and total_seconds is not None:
            self.seconds = dict.fromkeys(self.seconds, total_seconds / len(self.seconds))
        if self.seconds:
            write_record(self._key, self.mean)

    @property
    def mean(self) -> float:
        """Mean seconds of a program, of this start or of an earlier one."""
        seconds = list(self.seconds.values())
        return sum(seconds) / len(seconds) if seconds else self._stored_mean


def can_create_folder(folder: Path) -> bool:
    """Create a folder for programs. Returns False, with a warning, if it cannot be used."""
    if reason := prepare_private_folder(folder):
        warn_once(f"compiled programs are not kept in {folder}: {reason}")
    return not reason


def program_folder() -> Path | None:
    """Return the folder of stored programs; None if jax's cache is off or remote, or other users can write
    there."""
    cache_folder = jax.config.values["jax_compilation_cache_dir"]
    if not cache_folder or "://" in cache_folder:
        return None
    subfolder = Path(cache_folder) / "duetto"
    return subfolder if can_create_folder(subfolder) else None


def executable_key(
    phases: Phases,
    phase: str,
    arguments: Any,
    refused_kernels: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> str | None:
    """Return the key of a phase's program with these abstract arguments.

    Returns None on devices of several processes, and for phases whose code is not in the hash of
    `TRACED_MODULES`.

    refused_kernels: kernels that the program is traced without.
    options: XLA's options.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(arguments)]
    is_addressable = all(sharding.is_fully_addressable for sharding in shardings)
    encoder = phases.config.target.encoder if phase == "encode" else None
    parts = phases, getattr(phases, "proposer", None), encoder
    if not is_addressable or not all(map(is_traced_module, parts)):
        return None
    (device, *_) = shardings[0].device_set
    return hash_facts(
        gather_facts("program", device),
        describe_phase(phases, phase, arguments),
        refused_kernels,
        sorted((options or {}).items()),
    )


def is_traced_module(part: object) -> bool:
    """Return True if the class of a part is from a module of `TRACED_MODULES`, or if the part is None."""
    module = type(part).__module__.removeprefix("duetto.")
    return part is None or any(module == name or module.startswith(f"{name}.") for name in TRACED_MODULES)


def describe_phase(phases: Phases, phase: str, arguments: Any) -> tuple[Any, ...]:
    """Return the facts that decide a phase's program, besides the environment: phases, and the arguments'
    tree, shapes, dtypes and placement."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype), *describe_sharding(leaf.sharding)) for leaf in leaves]
    return phase, repr(phases), str(structure), shapes


def describe_sharding(sharding: jax.sharding.Sharding) -> tuple[str, list[int]]:
    """Return the facts of a sharding that decide a program: how it divides an array, and its devices' numbers
    in their order."""
    mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else sharding.device_set
    return str(sharding), [device.id for device in devices]


def combine_keys(keys: Iterable[str | None], *facts: Any) -> str | None:
    """Return one key for several keys and other facts; None if one of the keys is None."""
    keys = sorted(keys, key=str)
    return None if None in keys else hash_facts(keys, facts)


def read_record(key: str | None, record_type: type[T] | GenericAlias) -> T | None:
    """Return the record of type `record_type`, such as dict[str, bytes], that is stored under a key, or
    None."""
    content = read_entry(key)
    try:
        return msgspec.msgpack.decode(content, type=record_type) if content else None
    except msgspec.DecodeError:  # written by a version whose record had other fields
        return None


def write_record(key: str | None, record: Any) -> None:
    """Store a record for later starts; do nothing if the folder cannot be written."""
    write_entry(key, msgspec.msgpack.encode(record))


def read_entry(key: str | None) -> bytes | None:
    """Return the bytes that are stored under a key, or None. Returns b"" if the file was damaged, and
    replaces it."""
    if key is None or (folder_path := program_folder()) is None:
        return None
    blobs = BlobStore(folder_path, PROGRAM_FORMAT, MAX_FOLDER_BYTES)
    try:
        return blobs.read(key)
    except DamagedBlobError:
        warn_once(f"{blobs.path(key)} was damaged: it is deleted and made anew")
        write_entry(key, b"")
        return b""
    except OSError:  # most often the file does not exist
        return None


def write_entry(key: str | None, content: bytes) -> None:
    """Store bytes under a key; do nothing if the key is None or the folder cannot be written."""
    if key is not None and (folder_path := program_folder()) is not None:
        blobs = BlobStore(folder_path, PROGRAM_FORMAT, MAX_FOLDER_BYTES, EVICTION_GRACE_SECONDS)
        with suppress(OSError):
            blobs.refresh_index()
            blobs.write(key, content)


def join_single(program: T) -> T:
    """Return the program itself: the join of a program that has one part."""
    return program


def load_program(key: str | None, device: Any, join: Callable[..., Any] = join_single) -> Any:
    """Return the program that is stored under a key, or None.

    It is loaded on the devices that it was compiled for, of the client of `device`. `join` makes one program
    of its parts.
    """
    content = read_entry(key)
    if not content:
        return None
    try:
        return join(*(load_part(device.client, *part) for part in pickle.loads(content)))
    except Exception:  # noqa: BLE001 - each runtime raises other errors for a program that it cannot use
        return None


def load_part(client: Any, ids: Sequence[int], *program: Any) -> Any:
    """Load a part of a program on the devices that it was compiled for, by their numbers."""
    devices = {device.id: device for device in client.local_devices()}
    execution_devices = [devices[i] for i in ids]
    return serialize_executable.deserialize_and_load(
        *program, backend=client, execution_devices=execution_devices
    )


def serialize_part(compiled: Any) -> tuple[Any, ...]:
    """Return a part of a program as it is pickled: its devices' numbers in their order, then jax's fields."""
    ids = [device.id for device in compiled.runtime_executable().local_devices()]
    return ids, *serialize_executable.serialize(compiled)


def load_programs(
    pool: ThreadPoolExecutor,
    keys: Mapping[K, str | None],
    replicated_sharding: jax.sharding.Sharding,
    join: Callable[..., Any],
) -> dict[K, Any]:
    """Return the programs that are stored under keys, each joined from its parts; None for a missing
    program."""
    (device, *_) = replicated_sharding.device_set
    with progress.show_stage("reading kept programs", len(keys), progress.PATIENCE_SECONDS) as done:
        programs = pool.map(lambda key: done(load_program(key, device, join)), keys.values())
        return dict(zip(keys, programs, strict=True))


def compile_and_store(
    key: str | None, lowered: Lowered, options: Mapping[str, str | bool] | None = None
) -> Any:
    """Compile a program with these options of XLA, and store its parts if they can be serialised.

    On a CPU, a program that came from jax's cache cannot be serialised again. If its stored file was damaged,
    it is compiled once more, past jax's cache.
    """
    joined_programs = (
        lowered if isinstance(lowered, JoinedPrograms) else JoinedPrograms([lowered], join_single)
    )
    parts = [compile_part(part, options) for part in joined_programs.parts]
    if any(from_cache for _, from_cache in parts) and read_entry(key) == b"":
        unlike_any = {"xla_gpu_dump_autotune_logs_to": str(time.time_ns())}  # without effect on a CPU
        with suppress(ValueError, jax.errors.JaxRuntimeError):  # raised by an XLA that lacks the option
            parts = [compile_part(part, unlike_any) for part in joined_programs.parts]
    compiled, from_cache = zip(*parts, strict=True)
    if (
        program_folder() is not None
        and key is not None
        and not any(from_cache)
        and identity.hash_traced_sources() == identity.imported_sources_hash()
    ):
        with suppress(*UNSTORABLE_ERRORS):
            write_entry(key, pickle.dumps(list(map(serialize_part, compiled))))
    return joined_programs.join(*compiled)


def compile_part(lowered: Lowered, options: Mapping[str, str | bool] | None = None) -> tuple[Any, bool]:
    """Return the compiled program, and True if it is a CPU program from jax's cache."""
    listen_for_cache_hits()
    THREAD_STATE.hits = 0
    compiled = lowered.compile(compiler_options=options)
    return compiled, bool(THREAD_STATE.hits) and jax.default_backend() == "cpu"


@cache
def listen_for_cache_hits() -> None:
    """Start to count the hits of jax's cache, by thread."""

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            THREAD_STATE.hits = getattr(THREAD_STATE, "hits", 0) + 1

    jax.monitoring.register_event_listener(on_event)
