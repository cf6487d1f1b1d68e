"""Memory of one page that two processes of one host share: one writes, the other reads.

The memory belongs to no file: the other process opens it through its owner's entry in /proc, which the same
user may do. So nothing remains when the two processes end.
"""

import mmap
import os
import re
import secrets

from ..offload.tier import PageContent

MEMORY_PATH = re.compile(r"/proc/\d+/fd/\d+")
# Random bytes at its start, also sent over the network: on another host the path has other bytes.
PROOF_BYTES = 16


class SharedMemoryTransport:
    """Transport through memory without a file (`memfd_create`), on Linux."""

    def open_writer(self, size: int) -> "SharedMemoryWriter":
        return SharedMemoryWriter(size)

    def open_reader(self, offer: bytes, size: int) -> "SharedMemoryReader":
        return SharedMemoryReader(offer)


class SharedMemoryWriter:
    """Prefill engine's end: memory for a page of at most `size` bytes. Raises OSError if the system has no
    such memory."""

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a file")
        self._handle = os.memfd_create("duetto-pages")
        try:
            os.ftruncate(self._handle, PROOF_BYTES + size)
            self._map = mmap.mmap(self._handle, PROOF_BYTES + size)
        except BaseException:
            os.close(self._handle)
            raise
        proof = secrets.token_bytes(PROOF_BYTES)
        self._map[:PROOF_BYTES] = proof
        self.offer = proof + f"/proc/{os.getpid()}/fd/{self._handle}".encode()

    def write(self, content: PageContent) -> bytes:
        self._map[PROOF_BYTES : PROOF_BYTES + len(content)] = content
        return b""

    def wait_until_read(self, seconds: float) -> None:
        """Return at once: written bytes can be read."""

    def close(self) -> None:
        self._map.close()
        os.close(self._handle)


class SharedMemoryReader:
    """Decode engine's end. Raises OSError or ValueError if the memory is not on this host."""

    def __init__(self, offer: bytes):
        proof, path = offer[:PROOF_BYTES], offer[PROOF_BYTES:].decode()
        if not MEMORY_PATH.fullmatch(path):
            raise ValueError("no path of shared memory")
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._map = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        if self._map[:PROOF_BYTES] != proof:
            self._map.close()
            raise ValueError("another memory has this path")

    def read(self, size: int, carried: bytes, deadline: float) -> PageContent:
        """Return the page's bytes. Raises ValueError if the reader is closed."""
        return self._map[PROOF_BYTES : PROOF_BYTES + size]

    def close(self) -> None:
        self._map.close()
