"""A simulated disk: files in memory that survive their process, and faults."""

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from duetto.serve.host.blob_store import FileEntry, Files

SLOW = 0.5  # seconds of an operation on a slow disk, at most
SPLIT = 0.3  # probability that a fault leaves a part


class SimulatedDisk(Files):
    """Files of one machine. A write is on the disk only after `sync`, or a while later: a loss of power tears
    the last ones."""

    def __init__(self, clock: Callable[[], float], random: Random):
        self._clock, self._random = clock, random
        self.contents: dict[Path, bytes] = {}
        self.times: dict[Path, float] = {}
        self._changes: dict[Path, int] = defaultdict(int)
        self._unsynced: dict[Path, None] = {}
        self.jump = 0.0  # seconds by which the wall clock is wrong
        self.is_full = self.is_broken = self.is_slow = False
        self._waited = 0.0

    def wall_time(self) -> float:
        return 1e9 + self._clock() + self.jump

    def waited(self) -> float:
        """Return the seconds that operations have taken since the last call."""
        found, self._waited = self._waited, 0.0
        return found

    def _work(self, path: Path) -> None:
        if self.is_slow:
            self._waited += self._random.random() * SLOW
        if self.is_broken and self._random.random() < 0.5:
            raise OSError(errno.EIO, "input/output error", str(path))

    def _changed(self, path: Path) -> None:
        self._changes[path.parent] += 1

    def read(self, path: Path) -> bytes | None:
        self._work(path)
        if path not in self.contents:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self.contents[path]

    def write(self, path: Path, header: bytes, content: bytes, partial_prefix: str, durable: bool) -> None:
        self._work(path)
        if self.is_full:
            if self._random.random() < SPLIT:  # a process that is killed before it removes what it has begun
                left = path.parent / f"{partial_prefix}{self._random.randrange(1 << 30):x}"
                self.contents[left], self.times[left] = header, self.wall_time()
                self._changed(left)
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        self.contents[path], self.times[path] = header + content, self.wall_time()
        self._changed(path)
        if not durable:
            self._unsynced[path] = None

    def touch(self, path: Path) -> None:
        if path in self.times:
            self.times[path] = self.wall_time()

    def unlink(self, path: Path) -> None:
        if self.contents.pop(path, None) is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        del self.times[path]
        self._changed(path)

    def modified_ns(self, path: Path) -> int:
        if path in self.times:
            return int(1e9 * self.times[path])
        if path not in self._changes:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        return self._changes[path]

    def list_subfolders(self, folder: Path, name_length: int) -> list[str]:
        found = dict.fromkeys(path.parent for path in self.contents)
        return [own.name for own in found if own.parent == folder and len(own.name) == name_length]

    def scan(self, folder: Path) -> Iterator[FileEntry]:
        self._work(folder)
        for path, content in list(self.contents.items()):
            if path.parent == folder:
                yield FileEntry(self.times[path], path.name, len(content))

    # ------------------------------------------------------------ faults

    def sync(self) -> None:
        self._unsynced.clear()

    def lose_power(self) -> None:
        """Tear what was not synced: files are short, or have zeros in place of their last bytes."""
        for path in self._unsynced:
            if (content := self.contents.get(path)) is not None:
                kept = self._random.randrange(len(content) + 1)
                padding = bytes(len(content) - kept) if self._random.random() < 0.5 else b""
                self.contents[path] = content[:kept] + padding
                self._changed(path)
        self._unsynced.clear()

    def rot(self) -> None:
        """Change some bits of most files."""
        for path in [path for path in self.contents if self._random.random() < 0.8]:
            content = bytearray(self.contents[path])
            for _ in range(4 if content else 0):
                content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
            self.contents[path] = bytes(content)

    def image(self) -> dict[Path, bytes]:
        return dict(self.contents)

    def restore(self, image: dict[Path, bytes]) -> None:
        """Put an older state of the disk in its place."""
        for path in {**self.contents, **image}:
            self._changed(path)
        self.contents = dict(image)
        self.times = {path: self.times.get(path, self.wall_time()) for path in image}
        self._unsynced.clear()
