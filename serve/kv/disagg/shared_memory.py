"""A page's worth of memory that two processes of one host share: one writes, the other reads.

It belongs to no file: the other process opens it through its owner's entry in /proc, as the same user may, so
that nothing is left behind however the two end.
"""

import mmap
import os
import re
import secrets
from contextlib import suppress

from ..offload.tier import Content

PLACE = re.compile(r"/proc/\d+/fd/\d+")
PROOF = 16  # bytes at its start, which are told over the network: on another host there is another memory


class SharedMemoryWriter:
    """The owner's end, of so many bytes. Raises OSError where the system has no such memory."""

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
        self.proof, self.size = secrets.token_bytes(PROOF), size
        self._map[:PROOF] = self.proof
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"

    def write(self, content: Content) -> None:
        self._map[PROOF : PROOF + len(content)] = content

    def settle(self, seconds: float) -> None:
        """Nothing: what is written can be read."""

    def close(self) -> None:
        self._map.close()
        os.close(self._handle)


class SharedMemoryReader:
    """The other end."""

    def __init__(self, content: mmap.mmap):
        self._map = content

    @classmethod
    def at(cls, path: str, proof: bytes) -> "SharedMemoryReader | None":
        """None where it is not here."""
        if not PLACE.fullmatch(path) or not proof:
            return None
        with suppress(OSError, ValueError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                content = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
            finally:
                os.close(handle)
            if content[:PROOF] == proof:
                return cls(content)
            content.close()
        return None

    def read(self, size: int, until: float) -> Content:
        """Raises ValueError where it is closed."""
        return self._map[PROOF : PROOF + size]

    def close(self) -> None:
        self._map.close()
