"""Storage of one parameter in a Hugging Face file: tensor name, and order and merging of its axes."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

ArrayShape = tuple[int, ...]
NO_BLOCKS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Stored:
    """Storage of a parameter.

    name: of the tensor; `{}` is the layer's number. In files that number a layer's mixer and its feed-forward
        layer one after the other, `{mixer}` or `{ffn}` is that number.
    axes: "stored->ours" in the letters of the einsums.

    Stored axes are separated by commas, and letters together are one merged axis. "NH,D->DNH" is a query
    projection: a matrix [N*H, D] that is kept as [D, N, H].
    Parameters with the same name share a tensor, joined along the axis in brackets. "[NH],D->DNH" and
    "[KH],D->DKH" are parts of [N*H + K*H, D]; "N[H],R->RNH" and "N[U],R->RNU" of [N*(H + U), R].
    A letter of another parameter, or a digit, before the bracket counts blocks of the joined axis, each of
    which joins parts of all parameters: with "K[H],D->DKH", "K[NH],D->DNH" stores the queries of each key
    head before its key; "4[NH],D->DNH" has four blocks.
    "<F>" interleaves them: even columns are the first parameter's, odd ones the second's.
    A letter of ours alone is a second `{}` in the name, the expert's number: "F,D->EDF". "1" is a stored axis
    of size 1 that ours lack: "1,E->E". "->A" is a stored number without axes, which is an axis of 1 of ours.
    """

    name: str
    axes: str

    @property
    def our_axes(self) -> str:
        """Return the letters of our axes."""
        return self.axes.partition("->")[2]

    @property
    def axis_groups(self) -> list[str]:
        """Return the stored axes, each as the letters that are merged in it."""
        stored = re.sub(r"[\[\]<>]", "", self.axes.partition("->")[0])
        return stored.split(",") if stored else []

    @property
    def is_stacked(self) -> bool:
        """Return True if each entry of our first axis (an expert) is a tensor."""
        return self.our_axes[0] not in "".join(self.axis_groups)

    @property
    def is_interleaved(self) -> bool:
        """Return True if the tensor alternates between its parameters along the joined axis."""
        return "<" in self.axes

    @property
    def join_axis(self) -> int:
        """Return the stored axis along which parameters are joined."""
        return next((i for i, g in enumerate(self.axes.split(",")) if "[" in g or "<" in g), 0)

    def stored_sizes(self, shape: ArrayShape) -> list[int]:
        """Return the sizes of the stored axes as far as a parameter of this shape fills them."""
        sizes = dict(zip(self.our_axes, shape, strict=True))
        return [math.prod(sizes.get(letter, 1) for letter in group) for group in self.axis_groups]

    def view(self, array: np.ndarray, blocks: Mapping[str, int] = NO_BLOCKS) -> np.ndarray:
        """View our parameter, or one of its experts, as [before, joined, after] in the stored order. No copy
        is made.

        blocks: numbers of blocks by their letter or digit; 1 for those that are absent.
        """
        letters = self.our_axes[self.is_stacked :]
        sizes = {**blocks, **dict(zip(letters, array.shape, strict=True))}
        transposed = array.transpose(
            [letters.index(letter) for letter in "".join(self.axis_groups) if letter in letters]
        )
        before, _, after = (math.prod(sizes.get(letter, 1) for letter in axes) for axes in self.view_axes)
        view = transposed.reshape([before, array.size // (before * after), after])
        assert np.may_share_memory(view, array), f"{self.axes}: axes that are merged do not lie side by side"
        return view

    def from_stored(self, part: Any, shape: ArrayShape) -> Any:
        """Return our parameter of this shape, or one of its experts, from its part of a stored array of NumPy
        or jax. Returns the array itself if it lies as ours does."""
        ours = self.our_axes[self.is_stacked :]
        sizes = dict(zip(ours, shape, strict=True))
        letters = "".join(self.axis_groups).replace("1", "")
        if letters == ours and part.shape == shape:
            return part
        return part.reshape([sizes[letter] for letter in letters]).transpose(
            [letters.index(letter) for letter in ours]
        )

    @property
    def view_axes(self) -> tuple[str, str, str]:
        """Return the letters before, in and after the bracket. Without a bracket all rows belong to the
        parameter."""
        stored = self.axes.partition("->")[0].replace(",", "")
        if bracket := re.fullmatch(r"(\w*)[\[<](\w+)[\]>](\w*)", stored):
            return bracket[1], bracket[2], bracket[3]
        return (
            "",
            "".join(self.axis_groups[:-1] or self.axis_groups),
            self.axis_groups[-1] if self.axis_groups[1:] else "",
        )


def stored_shape(parts: Sequence[tuple[Stored, ArrayShape]]) -> ArrayShape:
    """Return the shape of the tensor that holds these parameters."""
    sizes = [stored.stored_sizes(shape) for stored, shape in parts]
    axis = parts[0][0].join_axis
    shape = sizes[0]
    if shape:
        shape[axis] = sum(part[axis] for part in sizes)
    return tuple(shape)
