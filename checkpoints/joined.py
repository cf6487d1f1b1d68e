"""Arrays that lie in one stored tensor, walked in the order of its file a piece at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PIECE = 1 << 20  # bytes; larger ones fall out of the CPU's caches while they are transposed


@dataclass(frozen=True)
class Joined:
    """Views [before, own, after] of the arrays: the tensor holds them side by side along `own`.

    Where they lie in turns, it holds the first of each, then the second of each, and so on; all are then
    equally long.
    """

    parts: tuple[np.ndarray, ...]
    in_turns: bool = False

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def blocks(self, itemsize: int) -> Iterator["Joined"]:
        """The tensor from its first number to its last, in blocks of about PIECE bytes of the file."""
        for run in self.runs():
            count = len(run.parts[0])
            step = max(1, PIECE * count // max(1, run.size * itemsize))
            for i in range(0, count, step):
                yield Joined(tuple(part[i : i + step] for part in run.parts), run.in_turns)

    def runs(self) -> Iterator["Joined"]:
        """Arrays with nothing before them follow one another, so that each is a run of its own."""
        if self.in_turns or len(self.parts[0]) != 1:
            yield self
            return
        for part in self.parts:
            yield Joined((part[0][:, None],))

    def values(self) -> np.ndarray:
        """The numbers in the file's order."""
        if self.in_turns:
            return np.stack(self.parts, axis=2)
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=1)

    def fill(self, values: np.ndarray) -> None:
        """Put numbers in the file's order into the arrays."""
        before, _, after = self.parts[0].shape
        values, start = values.reshape(before, -1, after), 0
        for i, part in enumerate(self.parts):
            own = part.shape[1]
            part[...] = values[:, i :: len(self.parts)] if self.in_turns else values[:, start : start + own]
            start += own
