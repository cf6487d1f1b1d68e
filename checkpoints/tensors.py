"""Safetensors files, read and written piece by piece, so that a model is never twice in the host's memory.

The safetensors package checks a file; the numbers are read by plain reads, because its own readers either map the
whole file into the process or hold each tensor twice. What is quantised (FP8, packed integers) is not read yet.
"""

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
PIECE = 1 << 20  # bytes; larger ones fall out of the CPU's caches while they are transposed


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, in one sentence: the file, the tensor or field, what was found, what is expected."""


@dataclass(frozen=True)
class Tensor:
    """One tensor in a safetensors file: `code` is the format's name of its dtype, `start` its first byte in the file."""

    file: Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype:
        return FLOATS[self.code]


def contents(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name. Raises CheckpointError where its header does not fit its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except SafetensorError as e:
        raise CheckpointError(f"{file}: cut off, or not a safetensors file ({e})") from e
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return {
        name: Tensor(file, name, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])
        for name, t in header.items()
    }


def pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Slices of the first axis of about PIECE bytes each."""
    step = max(1, PIECE // max(1, math.prod(shape[1:]) * itemsize))
    return (slice(i, i + step) for i in range(0, shape[0], step))


def is_finite(x: np.ndarray) -> bool:
    """Whether no float is NaN or infinite, by its bits: numpy's own test takes eight times as long for bfloat16."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    without_sign = x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return bool(np.all(without_sign < np.array(np.inf, x.dtype).view(unsigned)))


def read(tensor: Tensor, out: np.ndarray) -> None:
    """Fill `out`, any view whose order of elements is the file's, with a tensor's numbers cast to its dtype.

    Raises CheckpointError where a number is NaN or infinite, or becomes so in the cast.
    """
    assert out.size == math.prod(tensor.shape), (tensor, out.shape)
    with open(tensor.file, "rb", buffering=0) as f:
        f.seek(tensor.start)
        for piece in pieces(out.shape, tensor.dtype.itemsize):
            values = np.empty(out[piece].shape, tensor.dtype)
            fill(f, values, tensor)
            with np.errstate(over="ignore", invalid="ignore"):
                values = values.astype(out.dtype, copy=False)
            if not is_finite(values):
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} holds NaN or infinity as {out.dtype}, "
                    "expected finite numbers"
                )
            out[piece] = values


def fill(f: io.RawIOBase, values: np.ndarray, tensor: Tensor) -> None:
    rest = values.reshape(-1).view(np.uint8).data
    while rest:
        count = f.readinto(rest)
        if not count:
            raise CheckpointError(f"{tensor.file}: cut off inside tensor {tensor.name!r}")
        rest = rest[count:]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are stored with the same dtype, shape and bits."""
    if (a.code, a.shape) != (b.code, b.shape) or a.code not in FLOATS:
        return False
    size = math.prod(a.shape) * a.dtype.itemsize
    with open(a.file, "rb") as f, open(b.file, "rb") as g:
        f.seek(a.start)
        g.seek(b.start)
        counts = (min(PIECE, size - i) for i in range(0, size, PIECE))
        return all(f.read(count) == g.read(count) for count in counts)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at a multiple of 64 bytes, which jax takes over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def write(
    file: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[np.ndarray], dtype: np.dtype
) -> None:
    """Write tensors of these names and shapes as a safetensors file, which takes its name when it is whole.

    `arrays` gives the numbers in the same order, each as any view whose order of elements is the file's.
    Raises ValueError where a number is NaN or infinite, or becomes so in the cast.
    """
    code = next(code for code, known in FLOATS.items() if known == dtype)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(file.name + ".partial")
    try:
        with open(partial, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name, array in zip(shapes, arrays, strict=True):
                f.writelines(cast(name, array[piece], dtype) for piece in pieces(array.shape, dtype.itemsize))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def cast(name: str, values: np.ndarray, dtype: np.dtype) -> memoryview:
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(values, dtype)
    if not is_finite(values):
        raise ValueError(f"tensor {name!r} holds NaN or infinity as {dtype}, expected finite numbers")
    return values.reshape(-1).view(np.uint8).data
