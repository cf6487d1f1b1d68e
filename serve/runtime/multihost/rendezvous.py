"""Rendezvous of a group's processes: they connect to rank 0, which rejects a process that would run other
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
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ....checkpoints import orbax
from ....sampling.custom_processors import list_function_names
from ...host.devices import default_device, is_jax_initialized
from ...host.identity import gather_facts
from ...host.sockets.handshake import Handshake, HandshakeRejected, connect_to_listener, receive_handshake
from ...host.sockets.listener import AuthenticatedListener
from ...host.sockets.message_link import Link
from ...host.sockets.secret import HandshakeError, Secret, read_key
from ...host.streams import silence_stdout
from ...options.engine import EngineOptions
from .group import CAUSE_SECONDS, ProcessGroup
from .messages import GROUP_DECODER, GroupMessage, JoinAccepted
from .supervisor import TOKEN_VARIABLE, end_with_supervisor

P = ParamSpec("P")
T = TypeVar("T")
JOIN_TIMEOUT_SECONDS = 300.0  # seconds within which all ranks have to connect
HANDSHAKE_SECONDS = 5.0  # seconds within which a rank that has connected sends its facts
JOIN_RETRY_SECONDS = 0.1  # seconds between two attempts to connect to rank 0
SAMPLE_BYTES = 1 << 20  # bytes at each end of a file that are hashed
ConnectedRank = tuple[Link[GroupMessage], Handshake]  # link and handshake of a rank that has connected
RANK_OPTIONS = ("node_rank", "use_tqdm_on_load", "cluster_key_file")  # options in which ranks may differ
JOIN_LOCK = threading.Lock()
_GROUP: list[ProcessGroup] = []  # the group of this process: at most one in its life, as in jax.distributed


def current_group() -> ProcessGroup | None:
    """Return the group that this process has joined, or None."""
    return _GROUP[0] if _GROUP else None


def join_group(options: EngineOptions) -> EngineOptions:
    """Join the group of `nnodes` processes, before jax looks for devices. Returns this process's options:
    only rank 0 shows progress.

    Does nothing for one process, or if the group has been joined but does not serve yet. Raises ValueError if
    ranks would run other programs, or for a second LLM; TimeoutError if some ranks do not connect; OSError
    for an address that rank 0 cannot listen on.
    """
    if options.nnodes > 1:
        with JOIN_LOCK:
            if not _GROUP:
                form_group(options)
            elif _GROUP[0].is_serving or _GROUP[0].has_ended:
                raise ValueError(f"nnodes {options.nnodes} is not allowed: a group of processes has one LLM")
    return replace(options, use_tqdm_on_load=False) if options.node_rank else options


def form_group(options: EngineOptions) -> None:
    """Form the group: connect duetto's links, start jax's service, then compare the facts that need
    devices."""
    needs_init = not jax.distributed.is_initialized()
    if needs_init and is_jax_initialized():
        raise ValueError(
            f"nnodes {options.nnodes} is not allowed: jax has looked for devices already; begin with the LLM"
        )
    end_with_supervisor()
    facts, rank = rank_facts(options), options.node_rank
    links = [connect_to_rank_0(options, facts)] if rank else accept_ranks(options, facts)
    process_group = ProcessGroup(rank, options.nnodes, links, options.distributed_timeout_seconds)
    _GROUP.append(process_group)
    with silence_stdout():
        if needs_init:
            initialize_distributed(options)
            process_group.shutdown = jax.distributed.shutdown
        device = default_device()
        multihost_utils.sync_global_devices("duetto")
    if rank == 0:
        atexit.register(process_group.end_group)
    if (jax.process_index(), jax.process_count()) != (rank, options.nnodes):
        raise ValueError(
            f"node_rank {rank} of nnodes {options.nnodes} is not allowed: jax.distributed has made this "
            f"process {jax.process_index()} of {jax.process_count()}"
        )
    check_same_facts(gather_facts("rank device", device))


def initialize_distributed(options: EngineOptions) -> None:
    """Start jax's distributed service, on the port after duetto's. Its timeout for a lost rank is longer than
    the links' timeout: the links end the group first."""
    coordinator = f"{options.master_addr}:{options.master_port + 1}"
    jax.distributed.initialize(
        coordinator,
        options.nnodes,
        options.node_rank,
        coordinator_bind_address=coordinator,
        initialization_timeout=int(JOIN_TIMEOUT_SECONDS),
        shutdown_timeout_seconds=options.distributed_timeout_seconds,
        heartbeat_timeout_seconds=10 * options.distributed_timeout_seconds,
    )


def rank_facts(options: EngineOptions) -> dict[str, str]:
    """Return the facts that must be equal in all processes, by name: their programs depend on them."""
    option_values = {name: value for name, value in asdict(options).items() if name not in RANK_OPTIONS}
    # the processors' computations are a part of the sizes, which are compared later
    option_values["logits_processors"] = list_function_names(options.logits_processors)
    return gather_facts("rank") | {name: str(value) for name, value in option_values.items()}


def group_secret(options: EngineOptions) -> Secret:
    """Return the secret of a group: the key in the ranks' file, and the token of the start. Raises ValueError
    for a file that has no key."""
    return Secret("group", read_key(options.cluster_key_file) + os.environ.get(TOKEN_VARIABLE, "").encode())


def accept_ranks(options: EngineOptions, facts: dict[str, str]) -> list[Link[GroupMessage]]:
    """Accept the connections of all other ranks; returns rank 0's links to them, by rank. Raises TimeoutError
    if some do not connect, ValueError if one would run other programs."""
    links = dict[int, Link[GroupMessage]]()
    accepted = list[Link[GroupMessage]]()
    arrivals = queue.SimpleQueue[ConnectedRank]()
    listener: AuthenticatedListener[ConnectedRank] = AuthenticatedListener(
        (options.master_addr, options.master_port), group_secret(options), "duetto-group"
    )
    deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
    try:
        listener.start(
            lambda connection: receive_handshake(connection, HANDSHAKE_SECONDS, GROUP_DECODER), arrivals.put
        )
        while missing := {*range(1, options.nnodes)} - links.keys():
            try:
                link, handshake = arrivals.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise TimeoutError(
                    f"{format_ranks(missing)} did not come within {JOIN_TIMEOUT_SECONDS:g} s"
                ) from None
            accepted.append(link)
            links = {rank: old for rank, old in links.items() if not old.is_closed}
            reject_mismatched_rank(handshake, facts, options.nnodes, links, link)
            links[handshake.rank] = link
    except BaseException:
        for link in accepted:
            link.close()
        raise
    finally:
        listener.close()
        while not arrivals.empty():
            arrivals.get()[0].close()
    for link in links.values():
        link.send(JoinAccepted())
        link.set_timeout(options.distributed_timeout_seconds)
    return [links[rank] for rank in sorted(links)]


def format_ranks(ranks: set[int]) -> str:
    """Format ranks for an error message."""
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def reject_mismatched_rank(
    handshake: Handshake,
    facts: dict[str, str],
    nnodes: int,
    links: Mapping[int, Link[GroupMessage]],
    link: Link[GroupMessage],
) -> None:
    """Raise ValueError for a rank that cannot join the group, and send the reason to all connected ranks.

    links: links of the ranks that have joined, by rank.
    link: link of the rank that is checked.
    """
    missing = {*range(1, nnodes)} - links.keys()
    if differing := handshake.differing_facts(facts):
        name = differing[0]
        refusal = (
            f"{name} is {handshake.facts.get(name)} in rank {handshake.rank} and {facts.get(name)} in rank 0"
        )
    elif handshake.rank not in missing:
        refusal = f"node_rank {handshake.rank} is not allowed: {format_ranks(missing)} is missing"
    else:
        return
    for rank_link in (*links.values(), link):
        with suppress(OSError):
            rank_link.send(HandshakeRejected(refusal))
    raise ValueError(refusal)


def connect_to_rank_0(options: EngineOptions, facts: dict[str, str]) -> Link[GroupMessage]:
    """Connect to rank 0; returns the link once all ranks have connected. Raises ValueError if rank 0 rejects
    this process, TimeoutError if it is not reached."""
    secret = group_secret(options)
    deadline = time.monotonic() + JOIN_TIMEOUT_SECONDS
    last_error = "it does not answer"
    address, handshake = (options.master_addr, options.master_port), Handshake(facts, options.node_rank)
    timeout_seconds = options.distributed_timeout_seconds
    while True:
        try:
            return connect_to_listener(
                address, secret, handshake, JoinAccepted, GROUP_DECODER, timeout_seconds, JOIN_TIMEOUT_SECONDS
            )[0]
        except HandshakeError as why:
            raise ValueError(str(why)) from None
        except (OSError, EOFError) as error:  # rank 0 does not listen yet, or is ending
            last_error = str(error) or last_error
        if time.monotonic() > deadline:
            address_text = f"{options.master_addr}:{options.master_port}"
            raise TimeoutError(
                f"rank 0 was not found at {address_text} within {JOIN_TIMEOUT_SECONDS:g} s: {last_error}"
            )
        time.sleep(JOIN_RETRY_SECONDS)


def check_same_facts(facts: Mapping[str, str]) -> None:
    """Raise ValueError in all processes unless all have the same facts; a collective operation."""
    for name, fact in facts.items():
        digest = np.frombuffer(sha256(fact.encode()).digest(), np.uint8)
        digests = multihost_utils.process_allgather(digest)
        others = [rank for rank, row in enumerate(digests) if (row != digests[0]).any()]
        if others:
            raise ValueError(f"{name} of {format_ranks(set(others))} are others than of rank 0")


def is_chosen_by_rank_0(choose: Callable[[], bool]) -> bool:
    """Return rank 0's choice in all processes of a group; a collective operation."""
    process_group = current_group()
    if process_group is None:
        return choose()
    choice = np.asarray(process_group.rank == 0 and choose())
    return bool(multihost_utils.broadcast_one_to_all(choice))


def any_across_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag True if any process of a group has set it; a collective operation."""
    if current_group() is None or not flags:
        return list(flags)
    return multihost_utils.process_allgather(np.asarray(flags)).any(axis=0).tolist()


def check_same_weight_files(folder: Path) -> None:
    """Raise ValueError in all processes of a group unless a model's folder has the same weights in each.
    Compares the files' sizes, and their first and last bytes. Does nothing without a group."""
    if current_group() is None:
        return
    files = [*folder.glob("*.safetensors"), *(folder / orbax.PARAMS_FOLDER).rglob("*")]
    file_facts = [
        f"{f.relative_to(folder)} {f.stat().st_size} {hash_file_ends(f)}"
        for f in sorted(files)
        if f.is_file()
    ]
    check_same_facts({"files of the model": "\n".join(file_facts)})


def hash_file_ends(path: Path) -> str:
    """Return a hash of a file's first and last `SAMPLE_BYTES`."""
    with open(path, "rb") as content:
        first = content.read(SAMPLE_BYTES)
        content.seek(-min(SAMPLE_BYTES, path.stat().st_size), os.SEEK_END)
        return sha256(first + content.read()).hexdigest()


def fail_group_on_error(start: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that starts an engine: an error in one process of a group ends the other
    processes."""

    @wraps(start)
    def start_or_fail(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return start(*args, **kwargs)
        except Exception as error:
            if (process_group := current_group()) is not None and not process_group.is_serving:
                abandon_start(process_group, error)
            raise

    return start_or_fail


def abandon_start(process_group: ProcessGroup, error: Exception) -> None:
    """End a group because of an error of its start. Rank 0's process continues, and reports the error."""
    if process_group.rank or isinstance(error, jax.errors.JaxRuntimeError):
        process_group.fail_group(error)
    time.sleep(CAUSE_SECONDS)  # if a lost rank caused the error, its link reports that meanwhile
    process_group.end_group()
