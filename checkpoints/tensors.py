"""Safetensors files, read and written in pieces, so that the host never holds a model twice.

The safetensors package checks a file's header. Numbers are read by plain reads: the package's own readers map
the whole file into the process, or hold each tensor twice.
"""

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
MAX_TENSORS = 1 << 18  # in one file; the largest models of 2026 have half as many, in a hundred files
MAX_HEADER_BYTES = MAX_TENSORS << 7  # bytes
PIECE_BYTES = 1 << 20  # bytes; a larger piece does not fit the CPU's caches while it is transposed


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be loaded, as one sentence: file, tensor or field, actual and
    expected value."""


@dataclass(frozen=True)
class JoinedViews:
    """Views [before, length, after] of arrays that one tensor joins along the middle axis.

    views: the views, one for each parameter.
    is_interleaved: the tensor alternates between the views (the first entry of each, then the second); all
        have one length.
    """

    views: tuple[np.ndarray, ...]
    is_interleaved: bool = False

    @property
    def size(self) -> int:
        return sum(part.size for part in self.views)

    @property
    def dtype(self) -> np.dtype:
        return self.views[0].dtype

    def split_blocks(self, itemsize: int) -> Iterator["JoinedViews"]:
        """Yield the tensor from its first number to its last, in blocks of about PIECE_BYTES of the file."""
        for run in self.split_runs():
            count = len(run.views[0])
            step = max(1, PIECE_BYTES * count // max(1, run.size * itemsize))
            for i in range(0, count, step):
                yield JoinedViews(tuple(part[i : i + step] for part in run.views), run.is_interleaved)

    def split_runs(self) -> Iterator["JoinedViews"]:
        """Yield views that follow one another in the file, and whose first axis is in its order.

        Views without axes before the joined one are runs by themselves.
        """
        if self.is_interleaved or len(self.views[0]) != 1:
            yield self
            return
        for part in self.views:
            yield JoinedViews((part[0][:, None],))

    def file_values(self) -> np.ndarray:
        """Return the numbers in the file's order."""
        if self.is_interleaved:
            return np.stack(self.views, axis=2)
        return self.views[0] if len(self.views) == 1 else np.concatenate(self.views, axis=1)

    def fill_views(self, values: np.ndarray) -> None:
        """Write numbers, given in the file's order, into the views."""
        before, _, after = self.views[0].shape
        values, start = values.reshape(before, -1, after), 0
        for i, part in enumerate(self.views):
            length = part.shape[1]
            part[...] = (
                values[:, i :: len(self.views)] if self.is_interleaved else values[:, start : start + length]
            )
            start += length


class TensorSource(Protocol):
    """Tensor that can be read as floats, whatever its file stores: the interface for quantised checkpoints.

    code: dtype in the file format's notation.
    dtype: dtype of the rows; None if they cannot be read as floats.
    start: offset of the first byte in the file; tensors are read in this order.
    """

    @property
    def file(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def dtype(self) -> np.dtype | None: ...
    def read_rows(self, a: int, b: int) -> np.ndarray:
        """Read rows a to b into a new array [b - a, width]. All axes but the last count as rows; a vector's
        rows are its numbers."""
        ...


@dataclass(frozen=True)
class Tensor:
    """Tensor in a safetensors file.

    file, name: where it is stored.
    code: dtype in the notation of safetensors, such as "BF16".
    shape: sizes of its axes.
    start: offset of its first byte in the file.
    """

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype | None:
        return FLOATS.get(self.code)

    def read_rows(self, a: int, b: int) -> np.ndarray:
        assert self.dtype is not None, self
        return self.read_raw(a, b, self.dtype)

    def read_raw(self, a: int, b: int, dtype: np.dtype) -> np.ndarray:
        """Read rows a to b as numbers of any dtype with the stored dtype's width."""
        values = np.empty((b - a, row_width(self.shape)), dtype)
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.start + a * values.shape[1] * dtype.itemsize)
            fill_from_file(f, values, self)
        return values


def row_width(shape: tuple[int, ...]) -> int:
    """Return how many numbers a row of a tensor has."""
    return shape[-1] if len(shape) > 1 else 1


def list_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name. Reads the header only.

    Raises CheckpointError if the header does not fit the file's size, or is larger than any model needs.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            text = f.read(size) if size <= MAX_HEADER_BYTES else b""
        check_header(file, size, text.count(b'"data_offsets"'))
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: cut off, or not a safetensors file ({e})") from e
    header = json.loads(text)
    header.pop("__metadata__", None)
    return {
        name: Tensor(file, name, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])
        for name, t in header.items()
    }


def check_header(file: Path, num_bytes: int, count: int) -> None:
    """Raise CheckpointError for a header of too many bytes or tensors. Parsing a million tensors would take
    seconds."""
    if MAX_HEADER_BYTES < num_bytes <= file.stat().st_size - 8:
        raise CheckpointError(
            f"{file}: the header has {num_bytes} bytes, expected at most {MAX_HEADER_BYTES}"
        )
    if count > MAX_TENSORS:
        raise CheckpointError(f"{file}: holds {count} tensors, expected at most {MAX_TENSORS} in one file")


def is_finite(x: np.ndarray) -> bool:
    """Return True if no number is NaN or infinite.

    Compares bits as integers: numpy's own test takes eight times as long for bfloat16.
    """
    if x.dtype.kind in "iu":
        return True
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    without_sign = x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return bool(np.all(without_sign < np.array(np.inf, x.dtype).view(unsigned)))


def read_into_views(source: TensorSource, views: JoinedViews) -> None:
    """Fill the views that a tensor stores with its numbers, cast to their dtype.

    Raises CheckpointError if a number is NaN or infinite, or becomes so in the cast.
    """
    assert views.size == math.prod(source.shape) and source.dtype is not None, (source, views)
    row = 0
    for block in views.split_blocks(source.dtype.itemsize):
        count = block.size // row_width(source.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            values = source.read_rows(row, row + count).astype(views.dtype, copy=False)
        if not is_finite(values):
            raise CheckpointError(
                f"{source.file}: tensor {source.name!r} holds NaN or infinity as {views.dtype}, "
                "expected finite numbers"
            )
        block.fill_views(values)
        row += count


def fill_from_file(f: io.RawIOBase, values: np.ndarray, tensor: Tensor) -> None:
    """Read bytes from a file until an array is full. Raises CheckpointError at the end of the file."""
    rest = values.reshape(-1).view(np.uint8).data
    while rest:
        count = f.readinto(rest)
        if not count:
            raise CheckpointError(f"{tensor.file}: cut off inside tensor {tensor.name!r}")
        rest = rest[count:]


def same_numbers(a: TensorSource, b: TensorSource) -> bool:
    """Return True if two tensors have equal shapes, dtypes and bits. Reads both in pieces."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.dtype is not None and all(
        a.read_rows(*s).tobytes() == b.read_rows(*s).tobytes() for s in list_row_spans(a)
    )


def has_zeros_only(tensor: TensorSource) -> bool:
    """Return True if all numbers of a tensor are 0."""
    return tensor.dtype is not None and not any(
        tensor.read_rows(*span).any() for span in list_row_spans(tensor)
    )


def list_row_spans(tensor: TensorSource) -> Iterator[tuple[int, int]]:
    """Yield spans of rows, from a to b, of about PIECE_BYTES of a tensor's floats each."""
    rows = math.prod(tensor.shape) // max(1, row_width(tensor.shape))
    step = max(
        1, PIECE_BYTES // max(1, row_width(tensor.shape) * (tensor.dtype or np.dtype(np.uint8)).itemsize)
    )
    return ((i, min(rows, i + step)) for i in range(0, rows, step))


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an empty array at a multiple of 64 bytes. On a CPU, jax takes such memory over without a
    copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterable[JoinedViews]
) -> None:
    """Write a safetensors file under a temporary name, and rename it when it is complete.

    shapes: shape and dtype of each tensor, by name.
    arrays: the numbers, in the same order.

    Raises ValueError if a number is NaN or infinite, or becomes so in the cast.
    """
    text = encode_header(shapes)
    partial = file.with_name(file.name + ".partial")
    try:
        with open(partial, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for (name, (_, dtype)), views in zip(shapes.items(), arrays, strict=True):
                f.writelines(cast_blocks(name, views, dtype))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def encode_header(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> bytes:
    """Return the header of a safetensors file, padded to a multiple of 8 bytes."""
    codes = {dtype: code for code, dtype in FLOATS.items()}
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        tensors[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    return text + b" " * (-len(text) % 8)


def cast_blocks(name: str, views: JoinedViews, dtype: np.dtype) -> Iterator[memoryview]:
    """Yield a tensor's bytes in the file's order, cast to `dtype`. Raises ValueError for NaN and infinity."""
    for block in views.split_blocks(dtype.itemsize):
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(block.file_values(), dtype)
        if not is_finite(values):
            raise ValueError(f"tensor {name!r} holds NaN or infinity as {dtype}, expected finite numbers")
        yield values.reshape(-1).view(np.uint8).data
