"""Stored codes kept as they are: records of a quantised tensor's parts in place of the arrays that they stand
for.

A record's scales cover equal blocks of its axes, a file's may not: blocks are cut at the end of an axis, and
lie across heads that we keep apart. So each record has the coarsest blocks on which the file's scales are
constant.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...model.tree import Spec
from ...model.weights.compress import contracted_at
from ...model.weights.quant import Quantised, Scheme
from ..layout import Parameter, ParameterGroup
from ..tensors import Joined, TensorSource, aligned, read

Index = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class DerivedSource:
    """A TensorSource that is read from a stored one, in whose place it stands."""

    name: str
    of: TensorSource

    @property
    def file(self) -> Path:
        return self.of.file

    @property
    def code(self) -> str:
        return self.of.code

    @property
    def start(self) -> int:
        return self.of.start


@dataclass(frozen=True)
class CodesSource(DerivedSource):
    """Codes of a quantised tensor, as a TensorSource of their own."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]

    def rows(self, a: int, b: int) -> np.ndarray:
        return self.read(a, b)


@dataclass(frozen=True)
class TensorCodes:
    """A quantised tensor in the axes in which it is read.

    `values`: its codes, two to a byte along the axis `packed` if there is one. The number at i, j, ... has
    the scale (and the zero) at blocks[0][i], blocks[1][j], ...
    """

    scheme: Scheme
    values: CodesSource
    blocks: Index
    scale_dtype: np.dtype
    scales: Callable[[], np.ndarray]
    zeros: Callable[[], np.ndarray] | None = None
    packed: int | None = None


@runtime_checkable
class Coded(TensorSource, Protocol):
    """A Source that can be read as its codes. Nothing large is read before they are."""

    def codes(self) -> TensorCodes: ...


@dataclass(frozen=True)
class QuantisedGroup:
    """Parameters that are stored together, in one tensor or one for each expert, as records of its codes."""

    group: ParameterGroup
    codes: tuple[TensorCodes, ...]

    @property
    def possible(self) -> bool:
        """True if `Quantised` can hold the codes: a projection, with both codes of a byte in one place."""
        first, parameters = self.codes[0], self.group.parameters
        return (
            len({(c.scheme, c.scale_dtype, c.packed) for c in self.codes}) == 1
            and all(contracted_at(p.path) for p in parameters)
            and all(self.axis(p) is None or p.spec.shape[self.axis(p)] % 2 == 0 for p in parameters)
            and (first.packed is None or len(parameters) == 1 or first.packed != parameters[0].stored.joined)
        )

    def axis(self, p: Parameter) -> Any:
        """The parameter's axis along which codes lie two to a byte, counted from its last."""
        packed = self.codes[0].packed
        return (
            None if packed is None else p.stored.ours.index(p.stored.groups[packed][-1]) - len(p.stored.ours)
        )

    @cached_property
    def indices(self) -> dict[str, list[Index]]:
        """By path and tensor: which entry of the tensor's scales each entry of the record's own is, for each
        stored axis."""
        found = {}
        for p, places in zip(self.group.parameters, positions(self.group), strict=True):
            fine = [[c.blocks[i][at] for i, at in enumerate(places)] for c in self.codes]
            steps = [slice(None, None, granule(fine, axis)) for axis in range(places[0].ndim)]
            found[p.path] = [tuple(coarse(index, steps) for index in tensor) for tensor in fine]
        return found

    def specs(self) -> dict[str, Quantised]:
        """The records' structure by path."""
        return {p.path: self.record(p, *self.shapes(p)) for p in self.group.parameters}

    def shapes(self, p: Parameter) -> tuple[Spec, Spec, Spec | None]:
        """Values, scales and zeros."""
        c, indices = self.codes[0], self.indices[p.path]
        values, scales = list(p.spec.shape), np.broadcast_shapes(*(index.shape for index in indices[0]))
        if c.packed is not None:
            values[self.axis(p)] //= 2
        scales = (len(indices), *scales) if p.stored.stacked else scales
        axes = tuple(
            name if n > 1 or n == size else "group"
            for name, n, size in zip(p.spec.axes, scales, p.spec.shape, strict=True)
        )
        zeros = c.zeros and Spec(scales, axes, dtype=c.values.dtype)
        return (
            Spec(tuple(values), p.spec.axes, dtype=c.values.dtype),
            Spec(scales, axes, dtype=c.scale_dtype),
            zeros,
        )

    def record(self, p: Parameter, values: Any, scales: Any, zeros: Any) -> Quantised:
        return Quantised(values, scales, zeros, self.codes[0].scheme, self.axis(p) or -1)

    def read(self) -> dict[str, Quantised]:
        """The records by path, of numpy arrays. Raises CheckpointError where a code or a scale is no finite
        number."""
        shapes = [self.shapes(p) for p in self.group.parameters]
        values = [aligned(value.shape, np.dtype(value.dtype)) for value, *_ in shapes]
        rest = [
            [None if spec is None else np.empty(spec.shape, spec.dtype) for spec in own] for _, *own in shapes
        ]
        for i, codes in enumerate(self.codes):
            read(codes.values, self.group.parts(values, i))
            tables = codes.scales(), codes.zeros and codes.zeros()
            for p, own in zip(self.group.parameters, rest, strict=True):
                for table, array in zip(tables, own, strict=True):
                    if array is not None and table is not None:
                        (array[i] if p.stored.stacked else array)[...] = table[self.indices[p.path][i]]
        found = zip(self.group.parameters, values, rest, strict=True)
        return {p.path: self.record(p, codes, *own) for p, codes, own in found}


def keep(
    group: ParameterGroup, tensors: Mapping[str, TensorSource], dtype: np.dtype, form: str | None
) -> QuantisedGroup | None:
    """A group's codes, where all of it is quantised, in the scheme `form` or in any (None), and records can
    hold it.

    They must be smaller than arrays of this dtype would be.
    """
    found = [tensors[name] for name in group.names]
    sources = [source for source in found if isinstance(source, Coded)]
    if len(sources) < len(found):
        return None
    kept = QuantisedGroup(group, tuple(source.codes() for source in sources))
    if not kept.possible or form not in (None, kept.codes[0].scheme):
        return None
    whole = sum(prod(p.spec.shape) for p in group.parameters) * dtype.itemsize
    parts = [spec for p in group.parameters for spec in kept.shapes(p) if spec is not None]
    return kept if sum(prod(s.shape) * np.dtype(s.dtype).itemsize for s in parts) < whole else None


def positions(group: ParameterGroup) -> Iterator[Index]:
    """Where each parameter's numbers (one expert's) lie along each stored axis, in its own axes, 1 where they
    do not matter."""
    along = [list(places(group, axis)) for axis in range(len(group.parameters[0].stored.groups))]
    return zip(*along, strict=True)


def places(group: ParameterGroup, axis: int) -> list[np.ndarray]:
    arrays = [unnumbered(p, axis) for p in group.parameters]
    views = [p.stored.view(array) for p, array in zip(group.parameters, arrays, strict=True)]
    first = group.parameters[0].stored
    if axis == first.joined:
        together = [Joined(tuple(views), first.in_turns)]
    else:
        together = [Joined((view,)) for view in views]
    for joined in together:
        joined.fill(np.arange(joined.size))
    return arrays


def unnumbered(p: Parameter, axis: int) -> np.ndarray:
    letters, first = p.stored.groups[axis], int(p.stored.stacked)
    own = zip(p.stored.ours[first:], p.spec.shape[first:], strict=True)
    return np.empty([n if letter in letters else 1 for letter, n in own], np.int64)


def granule(tensors: list[list[np.ndarray]], axis: int) -> int:
    """The longest equal blocks of an axis inside of which no index changes."""
    indices = [index for tensor in tensors for index in tensor]
    size = max(index.shape[axis] for index in indices)
    others = tuple(i for i in range(indices[0].ndim) if i != axis)
    steps = [np.diff(index, axis=axis).any(axis=others) for index in indices if index.shape[axis] == size]
    return gcd(size, *(np.flatnonzero(np.any(steps, axis=0)) + 1).tolist())


def coarse(index: np.ndarray, steps: list[slice]) -> np.ndarray:
    """The entry of each block."""
    return index[tuple(step if n > 1 else slice(None) for step, n in zip(steps, index.shape, strict=True))]
