"""How one parameter lies in a Hugging Face file: its tensor's name, and how its axes are ordered and merged there."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stored:
    """A tensor's name, `{}` standing for the layer's number, and `axes` "stored->ours" in the letters of every einsum.

    Axes of the stored tensor are separated by commas; letters that stand together are merged there: "NH,D->DNH" is a
    query projection, stored as a matrix [N*H, D] and kept as [D, N, H].
    """

    name: str
    axes: str

    @property
    def ours(self) -> str:
        return self.axes.partition("->")[2]

    @property
    def merged(self) -> list[str]:
        return self.axes.partition("->")[0].split(",")

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The stored tensor's shape, from the shape of our parameter."""
        sizes = dict(zip(self.ours, ours, strict=True))
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.merged)

    def view(self, array: np.ndarray) -> np.ndarray:
        """Our parameter as a view in the stored order, merged axes still apart: no numbers move."""
        return array.transpose([self.ours.index(letter) for letter in "".join(self.merged)])
