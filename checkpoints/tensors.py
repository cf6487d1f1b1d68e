"""Safetensors files, read and written piece by piece, so that a model is never twice in the host's memory.

The safetensors package checks a file; the numbers are read by plain reads, because its own readers either map
the whole file into the process or hold each tensor twice.
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
MAX_TENSORS = 1 << 18  # in one file: the largest models of today have half as many, in a hundred files
MAX_HEADER = MAX_TENSORS << 7  # bytes
PIECE = 1 << 20  # bytes; larger ones fall out of the CPU's caches while they are transposed


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, in one sentence: the file, the tensor or field, what was found,
    what is expected."""


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


class TensorSource(Protocol):
    """A tensor that can be read as floats, whatever its file holds: the seam for quantised checkpoints.

    `code` is the file format's name of its dtype, `dtype` that of the rows (None where they cannot be read as
    floats), `start` its first byte in the file, by which tensors are read in order.
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
    def rows(self, a: int, b: int) -> np.ndarray:
        """Rows a to b, a new array [b - a, width]: all axes but the last count as one; a vector's rows are
        its numbers."""
        ...


@dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype | None:
        return FLOATS.get(self.code)

    def rows(self, a: int, b: int) -> np.ndarray:
        assert self.dtype is not None, self
        return self.raw(a, b, self.dtype)

    def raw(self, a: int, b: int, dtype: np.dtype) -> np.ndarray:
        """Rows a to b as numbers of any dtype that has the width of the stored one."""
        values = np.empty((b - a, width(self.shape)), dtype)
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.start + a * values.shape[1] * dtype.itemsize)
            fill(f, values, self)
        return values


def width(shape: tuple[int, ...]) -> int:
    """Numbers in a row of a tensor."""
    return shape[-1] if len(shape) > 1 else 1


def contents(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    Raises CheckpointError where its header does not fit its size, or is longer or has more tensors than any
    model needs.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            text = f.read(size) if size <= MAX_HEADER else b""
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


def check_header(file: Path, size: int, tensors: int) -> None:
    """Before a header is parsed, which takes seconds for a million tensors."""
    if MAX_HEADER < size <= file.stat().st_size - 8:
        raise CheckpointError(f"{file}: the header has {size} bytes, expected at most {MAX_HEADER}")
    if tensors > MAX_TENSORS:
        raise CheckpointError(f"{file}: holds {tensors} tensors, expected at most {MAX_TENSORS} in one file")


def is_finite(x: np.ndarray) -> bool:
    """True if no number is NaN or infinite, by its bits: numpy's own test takes eight times as long for
    bfloat16."""
    if x.dtype.kind in "iu":
        return True
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    without_sign = x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return bool(np.all(without_sign < np.array(np.inf, x.dtype).view(unsigned)))


def read(source: TensorSource, out: Joined) -> None:
    """Fill the arrays that lie in one tensor with its numbers, cast to their dtype.

    Raises CheckpointError where a number is NaN or infinite, or becomes so in the cast.
    """
    assert out.size == math.prod(source.shape) and source.dtype is not None, (source, out)
    row = 0
    for block in out.blocks(source.dtype.itemsize):
        count = block.size // width(source.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            values = source.rows(row, row + count).astype(out.dtype, copy=False)
        if not is_finite(values):
            raise CheckpointError(
                f"{source.file}: tensor {source.name!r} holds NaN or infinity as {out.dtype}, "
                "expected finite numbers"
            )
        block.fill(values)
        row += count


def fill(f: io.RawIOBase, values: np.ndarray, tensor: Tensor) -> None:
    rest = values.reshape(-1).view(np.uint8).data
    while rest:
        count = f.readinto(rest)
        if not count:
            raise CheckpointError(f"{tensor.file}: cut off inside tensor {tensor.name!r}")
        rest = rest[count:]


def same_numbers(a: TensorSource, b: TensorSource) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype is None:
        return False
    rows = math.prod(a.shape) // max(1, width(a.shape))
    step = max(1, PIECE // max(1, width(a.shape) * a.dtype.itemsize))
    spans = ((i, min(rows, i + step)) for i in range(0, rows, step))
    return all(a.rows(*span).tobytes() == b.rows(*span).tobytes() for span in spans)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes, which jax takes over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def write(
    file: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterable[Joined]
) -> None:
    """Write tensors of these names, shapes and dtypes as a safetensors file, which takes its name when it is
    whole.

    `arrays` yields the numbers in the same order. Raises ValueError where one is NaN or infinite, or becomes
    so in the cast.
    """
    text = header(shapes)
    partial = file.with_name(file.name + ".partial")
    try:
        with open(partial, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for (name, (_, dtype)), joined in zip(shapes.items(), arrays, strict=True):
                f.writelines(cast_blocks(name, joined, dtype))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def header(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> bytes:
    codes = {dtype: code for code, dtype in FLOATS.items()}
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        tensors[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tensors).encode()
    return text + b" " * (-len(text) % 8)


def cast_blocks(name: str, joined: Joined, dtype: np.dtype) -> Iterator[memoryview]:
    for block in joined.blocks(dtype.itemsize):
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(block.values(), dtype)
        if not is_finite(values):
            raise ValueError(f"tensor {name!r} holds NaN or infinity as {dtype}, expected finite numbers")
        yield values.reshape(-1).view(np.uint8).data
