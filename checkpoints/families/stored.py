"""Storage of one parameter in a Hugging Face file: its tensor's name, and how its axes are ordered, merged
and joined there."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor's name, `{}` standing for the layer's number, and `axes` "stored->ours" in the letters of
    every einsum.

    Axes of the stored tensor are separated by commas; letters that stand together are merged there:
    "NH,D->DNH" is a query projection, stored as a matrix [N*H, D] and kept as [D, N, H]. Where several
    parameters have one name, their tensor is shared and brackets mark the axis along which they are joined:
    "[NH],D->DNH" and "[KH],D->DKH" are parts of [N*H + K*H, D], "N[H],R->RNH" and "N[U],R->RNU" of [N*(H +
    U), R]. "<F>" says that they take turns: even columns are the first parameter's, odd ones the second's. A
    letter that only we have stands for a second `{}` in the name, the expert's number: "F,D->EDF". "1" is a
    stored axis of one that we do not have: "1,E->E".
    """

    name: str
    axes: str

    @property
    def ours(self) -> str:
        return self.axes.partition("->")[2]

    @property
    def groups(self) -> list[str]:
        """The stored axes, each as the letters that are merged in it."""
        return re.sub(r"[\[\]<>]", "", self.axes.partition("->")[0]).split(",")

    @property
    def stacked(self) -> bool:
        """True if each entry of our first axis is a tensor of its own."""
        return self.ours[0] not in "".join(self.groups)

    @property
    def in_turns(self) -> bool:
        return "<" in self.axes

    @property
    def joined(self) -> int:
        """The stored axis along which parameters are joined."""
        return next((i for i, g in enumerate(self.axes.split(",")) if "[" in g or "<" in g), 0)

    def sizes(self, shape: Shape) -> list[int]:
        """The sizes of the stored axes as far as this parameter fills them, from the shape of our
        parameter."""
        sizes = {"1": 1} | dict(zip(self.ours, shape, strict=True))
        return [math.prod(sizes[letter] for letter in group) for group in self.groups]

    def view(self, array: np.ndarray) -> np.ndarray:
        """Our parameter (one expert's, where they are stacked) as a view [before, own, after] in the stored
        order."""
        ours = self.ours[self.stacked :]
        sizes = {"1": 1} | dict(zip(ours, array.shape, strict=True))
        turned = array.transpose([ours.index(letter) for letter in "".join(self.groups) if letter != "1"])
        view = turned.reshape([math.prod(sizes[letter] for letter in letters) for letters in self.sides])
        assert np.may_share_memory(view, array), f"{self.axes}: axes that are merged do not lie side by side"
        return view

    @property
    def sides(self) -> tuple[str, str, str]:
        """Letters before, in and after the bracket; without one, all rows are the parameter's own."""
        stored = self.axes.partition("->")[0].replace(",", "")
        if bracket := re.fullmatch(r"(\w*)[\[<](\w+)[\]>](\w*)", stored):
            return bracket[1], bracket[2], bracket[3]
        return "", "".join(self.groups[:-1]) or self.groups[0], self.groups[-1] if self.groups[1:] else ""


def stored_shape(parts: Sequence[tuple[Stored, Shape]]) -> Shape:
    """The shape of the tensor that holds these parameters."""
    sizes = [stored.sizes(shape) for stored, shape in parts]
    joined = parts[0][0].joined
    whole = sizes[0]
    whole[joined] = sum(part[joined] for part in sizes)
    return tuple(whole)
