"""Stored parts of a quantised weight: codes, scales and zeros in tensors beside each other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..tensors import FLOATS, CheckpointError, Tensor, is_finite

F32, I32, I8, U8 = (np.dtype(t) for t in (np.float32, np.int32, np.int8, np.uint8))
FP8, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
SCALE_DTYPES = FLOATS | {"F8_E8M0": E8M0, "F8_E4M3": FP8}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


class LastRead:
    """Cache of the last tensor or expert that was read.

    Rows are read piece after piece, and some formats store them across the whole tensor.
    """

    def __init__(self):
        self.key: Any = None
        self.value: Any = None

    def get_or_read(self, key: Any, read: Callable[[], Any]) -> Any:
        """Return the cached value of a key; another key is read with `read` and replaces it."""
        if key != self.key:
            self.key, self.value = key, read()
        return self.value


def tensor_error(tensor: Tensor, expected: str) -> CheckpointError:
    """Return the error for a tensor of a wrong dtype or shape."""
    return CheckpointError(
        f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.code} and shape {tensor.shape}, "
        f"expected {expected}"
    )


def find_part(parts: Mapping[str, Tensor], tensor: Tensor, *names: str) -> Tensor:
    """Return the one part of these names that a weight has. Raises CheckpointError if it has none or
    several."""
    matches = [parts[name] for name in names if name in parts]
    if len(matches) > 1:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has {' and '.join(names)} beside it, expected one"
        )
    if not matches:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} has no {' or '.join(names)} beside it")
    return matches[0]


def read_whole_tensor(tensor: Tensor, dtype: np.dtype | None = None) -> np.ndarray:
    """Read a whole tensor, as floats or in another dtype."""
    dtype = SCALE_DTYPES[tensor.code] if dtype is None else dtype
    return tensor.read_raw(
        0, int(np.prod(tensor.shape[:-1] if tensor.shape[1:] else tensor.shape)), dtype
    ).reshape(tensor.shape)


def read_finite_scales(tensor: Tensor) -> np.ndarray:
    """Read all floats of a tensor. Raises CheckpointError if one is not finite."""
    return check_finite_scales(tensor, read_whole_tensor(tensor))


def check_finite_scales(tensor: Tensor, scales: np.ndarray) -> np.ndarray:
    """Return scales that were read from a tensor. Raises CheckpointError if one is not finite."""
    if not is_finite(scales.astype(F32)):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} holds NaN or infinity, expected finite numbers"
        )
    return scales


def unpack_words(words: np.ndarray, axis: int, bits: int, order: Iterable[int]) -> np.ndarray:
    """Return the integers along an axis of 32-bit words. `order` says which bits of a word hold each."""
    mask = np.uint32((1 << bits) - 1)
    fields = [(words.view(np.uint32) >> np.uint32(i * bits)) & mask for i in order]
    shape = list(words.shape)
    shape[axis] *= len(fields)
    return np.stack(fields, axis=axis + 1).reshape(shape).astype(np.int32)
