"""Memory of one page that two processes of one host share: one writes, the other reads.

The memory belongs to no file: the other process opens it through its owner's entry in /proc, as the same user
may, so that nothing is left behind however the two end.
"""

import mmap
import os
import re
import secrets

from ..offload.tier import Content

PLACE = re.compile(r"/proc/\d+/fd/\d+")
PROOF = 16  # random bytes at its start, also sent over the network: a path on another host is other memory


class SharedMemoryTransport:
    """Memory without a file, on Linux."""

    def writer(self, size: int) -> "SharedMemoryWriter":
        return SharedMemoryWriter(size)

    def reader(self, offer: bytes, size: int) -> "SharedMemoryReader":
        return SharedMemoryReader(offer)


class SharedMemoryWriter:
    """The owner's end, of `size` bytes. Raises OSError where the system has no such memory."""

    def __init__(self, size: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a file")
        self._handle = os.memfd_create("duetto-pages")
        try:
            os.ftruncate(self._handle, PROOF + size)
            self._map = mmap.mmap(self._handle, PROOF + size)
        except BaseException:
            os.close(self._handle)
            raise
        proof = secrets.token_bytes(PROOF)
        self._map[:PROOF] = proof
        self.offer = proof + f"/proc/{os.getpid()}/fd/{self._handle}".encode()

    def write(self, content: Content) -> bytes:
        self._map[PROOF : PROOF + len(content)] = content
        return b""

    def settle(self, seconds: float) -> None:
        """Return at once: what is written can be read."""

    def close(self) -> None:
        self._map.close()
        os.close(self._handle)


class SharedMemoryReader:
    """The other end. Raises OSError and ValueError where the memory is not on this host."""

    def __init__(self, offer: bytes):
        proof, path = offer[:PROOF], offer[PROOF:].decode()
        if not PLACE.fullmatch(path):
            raise ValueError("no path of shared memory")
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._map = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        if self._map[:PROOF] != proof:
            self._map.close()
            raise ValueError("another memory has this path")

    def read(self, size: int, carried: bytes, until: float) -> Content:
        """Raises ValueError where it is closed."""
        return self._map[PROOF : PROOF + size]

    def close(self) -> None:
        self._map.close()
