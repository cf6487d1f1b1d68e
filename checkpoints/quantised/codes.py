"""Stored codes that are kept: quantised tensors in a file become `Quantised` records, not arrays of floats.

A record has one scale for equal blocks of its axes. A file's blocks may differ: the last one of an axis may
be shorter, and a block may span heads that we keep apart. So each record has the largest blocks on which the
file's scales are constant.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...model.tree import Spec
from ...model.weights.compression.compress import contracted_axes
from ...model.weights.quant import LOST_CODES, Quantised, find_lost_codes
from ..families.storage import NO_BLOCKS
from ..layout import Parameter, ParameterGroup
from ..tensors import CheckpointError, JoinedViews, TensorSource, empty_aligned, read_into_views

AxisIndices = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class DerivedSource:
    """TensorSource that is read from a stored tensor and replaces it.

    name: of the tensor without quantisation.
    tensor: the stored tensor.
    """

    name: str
    tensor: TensorSource

    @property
    def file(self) -> Path:
        return self.tensor.file

    @property
    def code(self) -> str:
        return self.tensor.code

    @property
    def start(self) -> int:
        return self.tensor.start


@dataclass(frozen=True)
class CodesSource(DerivedSource):
    """Codes of a quantised tensor, as a TensorSource.

    shape, dtype: of the codes.
    read_codes: returns rows a to b.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read_codes: Callable[[int, int], np.ndarray]

    def read_rows(self, a: int, b: int) -> np.ndarray:
        return self.read_codes(a, b)


@dataclass(frozen=True)
class TensorCodes:
    """Codes, scales and zeros of a quantised tensor, in the axes in which it is read.

    scheme: key in `SCHEMES`.
    source: the codes.
    blocks: for each axis, the index of the scale of each entry: number [i, j] has scale [blocks[0][i],
    blocks[1][j]].
    scale_dtype: dtype of the scales.
    read_scales, read_zeros: read the scales, and the zeros if there are any.
    packed_axis: axis along which a byte holds two codes, or None.
    """

    scheme: str
    source: CodesSource
    blocks: AxisIndices
    scale_dtype: np.dtype
    read_scales: Callable[[], np.ndarray]
    read_zeros: Callable[[], np.ndarray] | None = None
    packed_axis: int | None = None


@runtime_checkable
class QuantisedSource(TensorSource, Protocol):
    """TensorSource that can also be read as its codes. Nothing large is read before the codes are."""

    def tensor_codes(self) -> TensorCodes: ...


@dataclass(frozen=True)
class QuantisedGroup:
    """Parameters that are stored together, as records of the codes of one tensor, or of one tensor for each
    expert.

    group: the parameters.
    codes: of each tensor.
    """

    group: ParameterGroup
    codes: tuple[TensorCodes, ...]

    @property
    def fits_record(self) -> bool:
        """Return True if `Quantised` can hold the codes.

        The parameters must be projections, and both codes of a byte must belong to one parameter.
        """
        first, parameters = self.codes[0], self.group.parameters
        return (
            len({(c.scheme, c.scale_dtype, c.packed_axis, c.read_zeros is None) for c in self.codes}) == 1
            and all(contracted_axes(p.path) for p in parameters)
            and all(
                self.packed_axis(p) is None or p.spec.shape[self.packed_axis(p)] % 2 == 0 for p in parameters
            )
            and (
                first.packed_axis is None
                or len(parameters) == 1
                or first.packed_axis != parameters[0].stored.join_axis
            )
        )

    def packed_axis(self, p: Parameter) -> Any:
        """Return the parameter's axis along which a byte holds two codes, counted from the end (negative), or
        None."""
        packed = self.codes[0].packed_axis
        return (
            None
            if packed is None
            else p.stored.our_axes.index(p.stored.axis_groups[packed][-1]) - len(p.stored.our_axes)
        )

    @cached_property
    def scale_indices(self) -> dict[str, list[AxisIndices]]:
        """Return indices into the file's scales, by path and tensor.

        For each stored axis, they are the entry of the file's scales for each entry of the record's.
        """
        by_path = {}
        for p, positions in zip(self.group.parameters, axis_positions(self.group), strict=True):
            fine = [[c.blocks[i][at] for i, at in enumerate(positions)] for c in self.codes]
            steps = [slice(None, None, block_length(fine, axis)) for axis in range(positions[0].ndim)]
            by_path[p.path] = [tuple(first_of_blocks(index, steps) for index in tensor) for tensor in fine]
        return by_path

    def record_specs(self) -> dict[str, Quantised]:
        """Return the specs of the records, by path."""
        return {p.path: self.make_record(p, *self.part_specs(p)) for p in self.group.parameters}

    def part_specs(self, p: Parameter) -> tuple[Spec, Spec, Spec | None]:
        """Return the specs of a record's values, scales and zeros (None without zeros)."""
        c, indices = self.codes[0], self.scale_indices[p.path]
        values, scales = list(p.spec.shape), np.broadcast_shapes(*(index.shape for index in indices[0]))
        if c.packed_axis is not None:
            values[self.packed_axis(p)] //= 2
        scales = (len(indices), *scales) if p.stored.is_stacked else scales
        axes = tuple(
            name if n > 1 or n == size else "group"
            for name, n, size in zip(p.spec.axes, scales, p.spec.shape, strict=True)
        )
        zeros = c.read_zeros and Spec(scales, axes, dtype=c.source.dtype)
        return (
            Spec(tuple(values), p.spec.axes, dtype=c.source.dtype),
            Spec(scales, axes, dtype=c.scale_dtype),
            zeros,
        )

    def make_record(self, p: Parameter, values: Any, scales: Any, zeros: Any) -> Quantised:
        """Return a record with these values, scales and zeros."""
        return Quantised(values, scales, zeros, self.codes[0].scheme, self.packed_axis(p) or -1)

    def read_records(self) -> dict[str, Quantised]:
        """Read the records by path, with numpy arrays. Raises CheckpointError for codes or scales that are
        not finite, and for scales of 0 beside codes."""
        shapes = [self.part_specs(p) for p in self.group.parameters]
        values = [empty_aligned(value.shape, np.dtype(value.dtype)) for value, *_ in shapes]
        others = [
            [None if spec is None else np.empty(spec.shape, spec.dtype) for spec in scale_specs]
            for _, *scale_specs in shapes
        ]
        for i, codes in enumerate(self.codes):
            read_into_views(codes.source, self.group.tensor_views(values, i))
            tables = codes.read_scales(), codes.read_zeros and codes.read_zeros()
            for p, scale_arrays in zip(self.group.parameters, others, strict=True):
                for table, array in zip(tables, scale_arrays, strict=True):
                    if array is not None and table is not None:
                        (array[i] if p.stored.is_stacked else array)[...] = table[
                            self.scale_indices[p.path][i]
                        ]
        arrays = zip(self.group.parameters, values, others, strict=True)
        records = {p.path: self.make_record(p, codes, *scale_arrays) for p, codes, scale_arrays in arrays}
        if (path := find_lost_codes(records)) is not None:
            raise CheckpointError(f"{self.codes[0].source.file}: parameter {path} {LOST_CODES}")
        return records


def select_quantised_group(
    group: ParameterGroup, tensors: Mapping[str, TensorSource], dtype: np.dtype, form: str | None
) -> QuantisedGroup | None:
    """Return the codes of a group, or None if its parameters are better read as arrays.

    Codes are kept if all tensors are quantised, in the scheme `form` (None is any), and records can hold
    them. They must also be smaller than arrays of `dtype`.
    """
    stored = [tensors[name] for name in group.names]
    sources = [source for source in stored if isinstance(source, QuantisedSource)]
    if len(sources) < len(stored):
        return None
    quantised = QuantisedGroup(group, tuple(source.tensor_codes() for source in sources))
    if not quantised.fits_record or form not in (None, quantised.codes[0].scheme):
        return None
    array_bytes = sum(prod(p.spec.shape) for p in group.parameters) * dtype.itemsize
    parts = [spec for p in group.parameters for spec in quantised.part_specs(p) if spec is not None]
    return quantised if sum(prod(s.shape) * np.dtype(s.dtype).itemsize for s in parts) < array_bytes else None


def axis_positions(group: ParameterGroup) -> Iterator[AxisIndices]:
    """Yield, for each parameter, the positions of its numbers along each stored axis.

    An array has the parameter's axes (one expert's), of size 1 where they do not change the position.
    """
    along = [
        list(stored_positions(group, axis)) for axis in range(len(group.parameters[0].stored.axis_groups))
    ]
    return zip(*along, strict=True)


def stored_positions(group: ParameterGroup, axis: int) -> list[np.ndarray]:
    """Return, for each parameter, the positions of its numbers along one stored axis."""
    arrays = [empty_positions(p, axis) for p in group.parameters]
    first = group.parameters[0].stored
    blocks = group.blocks if axis == first.join_axis else NO_BLOCKS
    views = [p.stored.view(array, blocks) for p, array in zip(group.parameters, arrays, strict=True)]
    if axis == first.join_axis:
        tensors = [JoinedViews(tuple(views), first.is_interleaved)]
    else:
        tensors = [JoinedViews((view,)) for view in views]
    for joined in tensors:
        joined.fill_views(np.arange(joined.size))
    return arrays


def empty_positions(p: Parameter, axis: int) -> np.ndarray:
    """Return an uninitialised array for the positions along a stored axis, in the parameter's axes."""
    letters, first = p.stored.axis_groups[axis], int(p.stored.is_stacked)
    axes = zip(p.stored.our_axes[first:], p.spec.shape[first:], strict=True)
    return np.empty([n if letter in letters else 1 for letter, n in axes], np.int64)


def block_length(tensors: list[list[np.ndarray]], axis: int) -> int:
    """Return the length of the longest equal blocks of an axis inside of which no index changes."""
    indices = [index for tensor in tensors for index in tensor]
    size = max(index.shape[axis] for index in indices)
    others = tuple(i for i in range(indices[0].ndim) if i != axis)
    steps = [np.diff(index, axis=axis).any(axis=others) for index in indices if index.shape[axis] == size]
    return gcd(size, *(np.flatnonzero(np.any(steps, axis=0)) + 1).tolist())


def first_of_blocks(index: np.ndarray, steps: list[slice]) -> np.ndarray:
    """Return the first entry of each block."""
    return index[tuple(step if n > 1 else slice(None) for step, n in zip(steps, index.shape, strict=True))]
