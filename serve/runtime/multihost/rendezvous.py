"""Rendezvous of a group's processes: they connect to rank 0, which rejects those that would run other
programs."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ....checkpoints import orbax
from ...host.devices import default_device, is_started, processor
from ...host.sockets.handshake import Handshake, HandshakeRejected, greet, meet
from ...host.sockets.link import Link
from ...host.sockets.port import Port
from ...host.sockets.secret import Refusal, Secret, key_in
from ...host.streams import silent_stdout
from ...options.engine import EngineOptions
from ..compiled import executable_cache
from .group import CAUSE, ProcessGroup
from .messages import DECODER, JoinAccepted, Message
from .supervisor import TOKEN, follow_supervisor

P = ParamSpec("P")
T = TypeVar("T")
JOINING = 300.0  # seconds in which all ranks have to be there
HELLO = 5.0  # seconds in which a rank that has connected sends its facts
PAUSE = 0.1  # seconds between two tries to reach rank 0
SAMPLE = 1 << 20  # bytes
Rank = tuple[Link[Message], Handshake]  # that has connected
SETTINGS = (  # of jax, which programs follow from
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_threefry_partitionable",
)  # fmt: skip
OWN = ("node_rank", "use_tqdm_on_load", "cluster_key_file")  # options in which ranks may differ
LOCK = threading.Lock()
_GROUP: list[ProcessGroup] = []  # that this process has joined: one in its life, as of jax.distributed


def group() -> ProcessGroup | None:
    """Return the group of this process, if it has joined one."""
    return _GROUP[0] if _GROUP else None


def join(options: EngineOptions) -> EngineOptions:
    """Connect `nnodes` processes, before jax looks for devices; nothing to do for one process, or for a group
    that is about to start. Returns the options of this process: only rank 0 shows its progress.

    Raises ValueError where ranks do not run the same, and for a second LLM, TimeoutError where some ranks do
    not come, OSError for an address that rank 0 cannot listen on.
    """
    if options.nnodes > 1:
        with LOCK:
            if not _GROUP:
                assemble(options)
            elif _GROUP[0].serves or _GROUP[0].ended:
                raise ValueError(f"nnodes {options.nnodes} is not allowed: a group of processes has one LLM")
    return replace(options, use_tqdm_on_load=False) if options.node_rank else options


def assemble(options: EngineOptions) -> None:
    """Join the group: duetto's links first, then jax's service, then the facts that need devices."""
    ours = not jax.distributed.is_initialized()
    if ours and is_started():
        raise ValueError(
            f"nnodes {options.nnodes} is not allowed: jax has looked for devices already; begin with the LLM"
        )
    follow_supervisor()
    facts, rank = own_facts(options), options.node_rank
    links = [reached(options, facts)] if rank else gathered(options, facts)
    found = ProcessGroup(rank, options.nnodes, links, options.distributed_timeout_seconds)
    _GROUP.append(found)
    with silent_stdout():
        if ours:
            initialize(options)
            found.shutdown = jax.distributed.shutdown
        device = default_device()
        multihost_utils.sync_global_devices("duetto")
    if rank == 0:
        atexit.register(found.end)
    if (jax.process_index(), jax.process_count()) != (rank, options.nnodes):
        raise ValueError(
            f"node_rank {rank} of nnodes {options.nnodes} is not allowed: jax.distributed has made this "
            f"process {jax.process_index()} of {jax.process_count()}"
        )
    agree({"device": f"{device.device_kind} {processor() if device.platform == 'cpu' else ''}"})


def initialize(options: EngineOptions) -> None:
    """Start jax's own service, on the port after duetto's. It waits longer for a lost rank than duetto's
    links, which end the group first."""
    place = f"{options.master_addr}:{options.master_port + 1}"
    jax.distributed.initialize(
        place,
        options.nnodes,
        options.node_rank,
        coordinator_bind_address=place,
        initialization_timeout=int(JOINING),
        shutdown_timeout_seconds=options.distributed_timeout_seconds,
        heartbeat_timeout_seconds=10 * options.distributed_timeout_seconds,
    )


def own_facts(options: EngineOptions) -> dict[str, str]:
    """Return what must be equal in all processes, because their programs depend on it, by name."""
    flags = {name: value for name, value in asdict(options).items() if name not in OWN}
    settings = {name: jax.config.values.get(name) for name in SETTINGS}
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    alike = versions | {"duetto": executable_cache.source()[:16]}
    return alike | {name: str(value) for name, value in (flags | settings).items()}


def secret_of(options: EngineOptions) -> Secret:
    """Return the secret of a group: the key in the ranks' file, and the token of one start. Raises ValueError
    for a file that has no key."""
    return Secret("group", key_in(options.cluster_key_file) + os.environ.get(TOKEN, "").encode())


def gathered(options: EngineOptions, facts: dict[str, str]) -> list[Link[Message]]:
    """Wait for all other ranks; return rank 0's links to them, in their order."""
    found, seen, came = dict[int, Link[Message]](), list[Link[Message]](), queue.SimpleQueue[Rank]()
    port: Port[Rank] = Port((options.master_addr, options.master_port), secret_of(options), "duetto-group")
    until = time.monotonic() + JOINING
    try:
        port.begin(lambda connection: greet(connection, HELLO, DECODER), came.put)
        while missing := {*range(1, options.nnodes)} - found.keys():
            try:
                link, hello = came.get(timeout=max(until - time.monotonic(), 0.001))
            except queue.Empty:
                raise TimeoutError(f"{named(missing)} did not come within {JOINING:g} s") from None
            seen.append(link)
            found = {rank: old for rank, old in found.items() if not old.is_closed}
            check(hello, facts, options.nnodes, found, link)
            found[hello.rank] = link
    except BaseException:
        for link in seen:
            link.close()
        raise
    finally:
        port.close()
        while not came.empty():
            came.get()[0].close()
    for link in found.values():
        link.send(JoinAccepted())
        link.wait_for(options.distributed_timeout_seconds)
    return [found[rank] for rank in sorted(found)]


def named(ranks: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def check(
    hello: Handshake,
    facts: dict[str, str],
    nnodes: int,
    found: Mapping[int, Link[Message]],
    link: Link[Message],
) -> None:
    """Raise ValueError for a rank that cannot be one of the group; all ranks that are connected are told."""
    missing = {*range(1, nnodes)} - found.keys()
    if differing := hello.differing(facts):
        name = differing[0]
        why = f"{name} is {hello.facts.get(name)} in rank {hello.rank} and {facts.get(name)} in rank 0"
    elif hello.rank not in missing:
        why = f"node_rank {hello.rank} is not allowed: {named(missing)} is missing"
    else:
        return
    for here in (*found.values(), link):
        with suppress(OSError):
            here.send(HandshakeRejected(why))
    raise ValueError(why)


def reached(options: EngineOptions, facts: dict[str, str]) -> Link[Message]:
    """Connect to rank 0, and return the link once all ranks are there."""
    secret, until, last = secret_of(options), time.monotonic() + JOINING, "it does not answer"
    address, hello = (options.master_addr, options.master_port), Handshake(facts, options.node_rank)
    seconds = options.distributed_timeout_seconds
    while True:
        try:
            return meet(address, secret, hello, JoinAccepted, DECODER, seconds, JOINING)[0]
        except Refusal as why:
            raise ValueError(str(why)) from None
        except (OSError, EOFError) as error:  # it is not there yet, or ends just now
            last = str(error) or last
        if time.monotonic() > until:
            place = f"{options.master_addr}:{options.master_port}"
            raise TimeoutError(f"rank 0 was not found at {place} within {JOINING:g} s: {last}")
        time.sleep(PAUSE)


def agree(what: Mapping[str, str]) -> None:
    """Raise ValueError in all processes unless all have the same facts; a collective operation."""
    for name, fact in what.items():
        own = np.frombuffer(sha256(fact.encode()).digest(), np.uint8)
        every = multihost_utils.process_allgather(own)
        others = [rank for rank, row in enumerate(every) if (row != every[0]).any()]
        if others:
            raise ValueError(f"{name} of {named(set(others))} are others than of rank 0")


def of_rank_0(choose: Callable[[], bool]) -> bool:
    """Return rank 0's choice in all processes of a group; a collective operation."""
    found = group()
    if found is None:
        return choose()
    own = np.asarray(found.rank == 0 and choose())
    return bool(multihost_utils.broadcast_one_to_all(own))


def in_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set in any process of a group; a collective operation."""
    if group() is None or not flags:
        return list(flags)
    return multihost_utils.process_allgather(np.asarray(flags)).any(axis=0).tolist()


def agree_on(folder: Path) -> None:
    """Raise ValueError in all processes of a group unless a model's folder has the same weights in each,
    judged by the sizes of its files and their first and last bytes; nothing to do without a group."""
    if group() is None:
        return
    files = [*folder.glob("*.safetensors"), *(folder / orbax.PARAMS).rglob("*")]
    ends = [f"{f.relative_to(folder)} {f.stat().st_size} {ends_of(f)}" for f in sorted(files) if f.is_file()]
    agree({"files of the model": "\n".join(ends)})


def ends_of(file: Path) -> str:
    """Hash a file's first and last bytes."""
    with open(file, "rb") as content:
        first = content.read(SAMPLE)
        content.seek(-min(SAMPLE, file.stat().st_size), os.SEEK_END)
        return sha256(first + content.read()).hexdigest()


def together(start: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that starts an engine: an error in one process of a group ends the others."""

    @wraps(start)
    def begun(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return start(*args, **kwargs)
        except Exception as error:
            if (found := group()) is not None and not found.serves:
                give_up(found, error)
            raise

    return begun


def give_up(found: ProcessGroup, error: Exception) -> None:
    """End a group for an error of its start. Rank 0's process goes on, so that it can report the error."""
    if found.rank or isinstance(error, jax.errors.JaxRuntimeError):
        found.refuse(error)
    time.sleep(CAUSE)  # where a rank was lost, its link says so
    found.end()
