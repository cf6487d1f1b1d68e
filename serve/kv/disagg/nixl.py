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

from ..offload.tier import PageContent

NIXL_POLL_SECONDS = 2e-5  # seconds between two polls


def import_nixl() -> Any:
    """Import NIXL. Raises ValueError, with the package to install, if it is missing."""
    raise_exceptions = logging.raiseExceptions
    try:
        package = import_module("nixl")
    except ImportError as error:
        raise ValueError(f"kv_transport nixl is not allowed: {error}; pip install 'duetto[nixl]'") from None
    logging.raiseExceptions = raise_exceptions  # the package turns it off for the whole process
    logging.getLogger("nixl").setLevel(logging.WARNING)  # and logs the rest to standard output
    return package


class Region(msgspec.Struct, frozen=True):
    """Offer of a writer: the memory that a reader may read.

    agent: metadata of the writer's NIXL agent.
    address: start of its registered memory.
    note: notification that the writer gets with each read.
    """

    agent: bytes
    address: int
    note: bytes


class RegisteredBuffer:
    """Memory of this process that other NIXL agents can read.

    bytes: the memory, uint8 [size].
    address: its start.
    registered: NIXL's handle of it.
    """

    def __init__(self, agent: Any, size: int):
        self.bytes = np.empty(size, np.uint8)
        self.address = self.bytes.ctypes.data
        self.registered = agent.register_memory([(self.address, size, 0, "")], "DRAM", ["UCX"])


class NixlAgent:
    """Transport by this process's NIXL agent, over UCX.

    Buffers are reused, and stay registered until the process ends: an abandoned read may still touch them.
    """

    def __init__(self):
        package = import_nixl()
        strict = package.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = package.nixl_agent_config(enable_prog_thread=False, sync_mode=strict)
        self.agent = package.nixl_agent(f"duetto-{secrets.token_hex(8)}", config)
        if "UCX" not in self.agent.backends:
            raise ValueError("kv_transport nixl is not allowed: its package has no UCX")
        self._free_buffers: dict[int, list[RegisteredBuffer]] = {}
        self._notes: set[bytes] = set()
        self._connections: Counter[str] = Counter()  # readers of each other agent
        self._lock = threading.Lock()

    def open_writer(self, size: int) -> "NixlWriter":
        return NixlWriter(self, size)

    def open_reader(self, offer: bytes, size: int) -> "NixlReader":
        return NixlReader(self, msgspec.msgpack.decode(offer, type=Region), size)

    def acquire_buffer(self, size: int) -> RegisteredBuffer:
        """Return a buffer of `size` bytes that is not in use, a registered one if there is one."""
        with self._lock:
            free_buffers = self._free_buffers.setdefault(size, [])
            return free_buffers.pop() if free_buffers else RegisteredBuffer(self.agent, size)

    def return_buffer(self, buffer: RegisteredBuffer) -> None:
        """Let a buffer be used again."""
        with self._lock:
            self._free_buffers[buffer.bytes.size].append(buffer)

    def buffer_metadata(self, buffer: RegisteredBuffer) -> bytes:
        """Return the metadata that another agent needs to read a buffer."""
        return self.agent.get_partial_agent_metadata(buffer.registered, inc_conn_info=True, backends=["UCX"])

    def connect_agent(self, metadata: bytes) -> str:
        """Register another agent by its metadata; returns its name. Its memory can be read until
        `disconnect_agent` was called once for each `connect_agent`."""
        with self._lock:
            agent_name = self.agent.add_remote_agent(metadata)
            self._connections[agent_name] += 1
            return agent_name

    def disconnect_agent(self, agent_name: str) -> None:
        """Undo one `connect_agent`; the last one removes the agent."""
        with self._lock:
            self._connections[agent_name] -= 1
            if not self._connections[agent_name]:
                del self._connections[agent_name]
                with suppress(Exception):  # it may be gone
                    self.agent.remove_remote_agent(agent_name)

    def has_notification(self, note: bytes) -> bool:
        """Make NIXL progress, and return True once for each arrival of a reader's notification."""
        with self._lock:
            for notes in self.agent.get_new_notifs().values():
                self._notes.update(notes)
            has_note = note in self._notes
            self._notes.discard(note)
            return has_note


class NixlWriter:
    """Prefill engine's end of a NIXL transport: a registered buffer of `size` bytes."""

    def __init__(self, agent: NixlAgent, size: int):
        self._agent, self._buffer, self._closed = agent, agent.acquire_buffer(size), False
        self._note = secrets.token_bytes(16)
        region = Region(agent.buffer_metadata(self._buffer), self._buffer.address, self._note)
        self.offer = msgspec.msgpack.encode(region)

    def write(self, content: PageContent) -> bytes:
        self._buffer.bytes[: len(content)] = np.frombuffer(content, np.uint8)
        return b""

    def wait_until_read(self, seconds: float) -> None:
        """Wait until the page is read. Raises TimeoutError after `seconds`, ConnectionError if NIXL fails."""
        deadline = time.monotonic() + seconds
        while not self._closed and not self._is_read():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(NIXL_POLL_SECONDS)

    def _is_read(self) -> bool:
        try:
            return self._agent.has_notification(self._note)
        except Exception as error:  # NIXL's errors have no common base class
            raise ConnectionError(f"NIXL: {type(error).__name__}") from error

    def close(self) -> None:
        self._closed = True
        self._agent.return_buffer(self._buffer)


class NixlReader:
    """Decode engine's end of a NIXL transport. Raises NIXL's errors if the writer's metadata cannot be
    loaded."""

    def __init__(self, agent: NixlAgent, region: Region, size: int):
        self._agent, self._region, self._closed = agent, region, False
        self._writer_agent = agent.connect_agent(region.agent)
        self._buffer, self._read_lock = agent.acquire_buffer(size), threading.Lock()

    def read(self, size: int, carried: bytes, deadline: float) -> PageContent:
        """Read a page of `size` bytes into the buffer, and return a copy. Raises TimeoutError at `deadline`
        (monotonic clock), ValueError if the reader is closed or the read fails."""
        with self._read_lock:
            if self._closed or size > self._buffer.bytes.size:
                raise ValueError("closed, or too large")
            try:
                self._transfer_page(size, deadline)
            except TimeoutError:
                raise
            except Exception as error:
                raise ValueError(f"not read: {type(error).__name__}") from error
            return self._buffer.bytes[:size].tobytes()

    def _transfer_page(self, size: int, deadline: float) -> None:
        """Read `size` bytes of the writer's memory into the buffer, polling until the read is done."""
        agent, region = self._agent.agent, self._region
        local, remote = (
            agent.get_xfer_descs([(address, size, 0)], "DRAM")
            for address in (self._buffer.address, region.address)
        )
        handle = agent.initialize_xfer("READ", local, remote, self._writer_agent, region.note, ["UCX"])
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                if self._closed:
                    raise ConnectionError
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(NIXL_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(state)
        finally:
            agent.release_xfer_handle(handle)

    def close(self) -> None:
        self._closed = True
        with self._read_lock:
            self._agent.disconnect_agent(self._writer_agent)
            self._agent.return_buffer(self._buffer)
