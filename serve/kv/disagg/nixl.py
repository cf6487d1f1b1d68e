"""Transport of pages through NIXL (github.com/ai-dynamo/nixl), of the extra `nixl`: RDMA reads of host
memory.

NIXL's own progress thread would keep a core busy, so there is none: the reader polls until its read is done,
and the writer makes progress while a page is on its way.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from ..offload.tier import Content

PAUSE = 2e-5  # seconds between two polls


def nixl() -> Any:
    """Import NIXL. Raises ValueError, with the package to install, where it is missing."""
    raises = logging.raiseExceptions
    try:
        found = import_module("nixl")
    except ImportError as error:
        raise ValueError(f"kv_transport nixl is not allowed: {error}; pip install 'duetto[nixl]'") from None
    logging.raiseExceptions = raises  # the package turns it off for the whole process
    logging.getLogger("nixl").setLevel(logging.WARNING)  # and logs the rest to standard output
    return found


class Region(msgspec.Struct, frozen=True):
    """A writer's offer.

    agent: metadata of the owner's NIXL agent.
    address: where its registered memory begins.
    note: notification that the owner gets with each read.
    """

    agent: bytes
    address: int
    note: bytes


class RegisteredBuffer:
    """Memory of this process that NIXL agents can read."""

    def __init__(self, own: Any, size: int):
        self.bytes = np.empty(size, np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = own.register_memory([(self.address, size, 0, "")], "DRAM", ["UCX"])


class NixlAgent:
    """Transport by this process's NIXL agent, over UCX.

    Buffers are lent, and stay registered until the process ends: a read that was given up may still touch
    them.
    """

    def __init__(self):
        package = nixl()
        strict = package.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = package.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)
        self.own = package.nixl_agent(f"duetto-{secrets.token_hex(8)}", config)
        if "UCX" not in self.own.backends:
            raise ValueError("kv_transport nixl is not allowed: its package has no UCX")
        self._free: dict[int, list[RegisteredBuffer]] = {}
        self._notes: set[bytes] = set()
        self._met: Counter[str] = Counter()  # readers of each other agent
        self._lock = threading.Lock()

    def writer(self, size: int) -> "NixlWriter":
        return NixlWriter(self, size)

    def reader(self, offer: bytes, size: int) -> "NixlReader":
        return NixlReader(self, msgspec.msgpack.decode(offer, type=Region), size)

    def lend(self, size: int) -> RegisteredBuffer:
        with self._lock:
            free = self._free.setdefault(size, [])
            return free.pop() if free else RegisteredBuffer(self.own, size)

    def take_back(self, lent: RegisteredBuffer) -> None:
        with self._lock:
            self._free[lent.bytes.size].append(lent)

    def metadata(self, lent: RegisteredBuffer) -> bytes:
        """Return what another agent needs to read a buffer."""
        return self.own.get_partial_agent_metadata(lent.registered, inc_conn_info=True, backends=["UCX"])

    def meet(self, metadata: bytes) -> str:
        """Return the name of another agent. Its memory can be read until each `meet` has its `part`."""
        with self._lock:
            other = self.own.add_remote_agent(metadata)
            self._met[other] += 1
            return other

    def part(self, other: str) -> None:
        with self._lock:
            self._met[other] -= 1
            if not self._met[other]:
                del self._met[other]
                with suppress(Exception):  # it may be gone
                    self.own.remove_remote_agent(other)

    def has_come(self, note: bytes) -> bool:
        """Make progress, and return whether a reader's notification has arrived since the last call that
        returned True for it."""
        with self._lock:
            for notes in self.own.get_new_notifs().values():
                self._notes.update(notes)
            found = note in self._notes
            self._notes.discard(note)
            return found


class NixlWriter:
    """The owner's end: a registered buffer of `size` bytes."""

    def __init__(self, agent: NixlAgent, size: int):
        self._agent, self._lent, self._closed = agent, agent.lend(size), False
        self._note = secrets.token_bytes(16)
        region = Region(agent.metadata(self._lent), self._lent.address, self._note)
        self.offer = msgspec.msgpack.encode(region)

    def write(self, content: Content) -> bytes:
        self._lent.bytes[: len(content)] = np.frombuffer(content, np.uint8)
        return b""

    def settle(self, seconds: float) -> None:
        """Wait until the page is read. Raises TimeoutError after `seconds`, and ConnectionError."""
        until = time.monotonic() + seconds
        while not self._closed and not self._has_come():
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(PAUSE)

    def _has_come(self) -> bool:
        try:
            return self._agent.has_come(self._note)
        except Exception as error:  # NIXL's own have no name in common
            raise ConnectionError(f"NIXL: {type(error).__name__}") from error

    def close(self) -> None:
        self._closed = True
        self._agent.take_back(self._lent)


class NixlReader:
    """The other end. Raises NIXL's errors where the owner's metadata cannot be loaded."""

    def __init__(self, agent: NixlAgent, region: Region, size: int):
        self._agent, self._region, self._closed = agent, region, False
        self._owner = agent.meet(region.agent)
        self._lent, self._reading = agent.lend(size), threading.Lock()

    def read(self, size: int, carried: bytes, until: float) -> Content:
        """Read a page into a buffer and copy it. Raises TimeoutError at `until` (monotonic clock), ValueError
        where the reader is closed or the read fails."""
        with self._reading:
            if self._closed or size > self._lent.bytes.size:
                raise ValueError("closed, or too large")
            try:
                self._fill(size, until)
            except TimeoutError:
                raise
            except Exception as error:
                raise ValueError(f"not read: {type(error).__name__}") from error
            return self._lent.bytes[:size].tobytes()

    def _fill(self, size: int, until: float) -> None:
        own, region = self._agent.own, self._region
        here, there = (
            own.get_xfer_descs([(address, size, 0)], "DRAM")
            for address in (self._lent.address, region.address)
        )
        handle = own.initialize_xfer("READ", here, there, self._owner, region.note, ["UCX"])
        try:
            state = own.transfer(handle)
            while state == "PROC":
                if self._closed:
                    raise ConnectionError
                if time.monotonic() > until:
                    raise TimeoutError
                time.sleep(PAUSE)
                state = own.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(state)
        finally:
            own.release_xfer_handle(handle)

    def close(self) -> None:
        self._closed = True
        with self._reading:
            self._agent.part(self._owner)
            self._agent.take_back(self._lent)
