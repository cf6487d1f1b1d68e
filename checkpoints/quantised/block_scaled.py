"""Matrices whose codes are stored row after row, with scales of blocks: FP8, integers, and four-bit floats of
compressed-tensors and ModelOpt."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from ...model.weights.nibbles import ZERO_CODE
from ..tensors import FLOATS, CheckpointError, Tensor
from .codes import CodesSource, DerivedSource, TensorCodes
from .parts import (
    E2M1,
    F32,
    FP8,
    I8,
    I32,
    SCALE_DTYPES,
    U8,
    check_finite_scales,
    find_part,
    read_whole_tensor,
    tensor_error,
    unpack_words,
)

Block = tuple[int, int]
PACKED_BITS = (4, 8)


@dataclass(frozen=True)
class CodeStorage:
    """Storage of a row's codes in a file.

    scheme: key in `SCHEMES`, in which the codes are kept.
    bits: of a code. Two codes of four bits share a byte, the first one in its lower half.
    file_dtype: dtype of the stored numbers. Words of 32 bits hold integers without a sign, plus half of
        their range.
    scale_dtypes: dtypes that scales may have, in the file format's notation.
    """

    scheme: str
    bits: int
    file_dtype: np.dtype
    scale_dtypes: frozenset[str]

    @property
    def dtype(self) -> np.dtype:
        return {"fp8": FP8, "int8": I8}.get(self.scheme, U8)

    @property
    def is_packed_in_words(self) -> bool:
        return self.file_dtype == I32

    def stored_width(self, columns: int) -> int:
        """Return how many stored numbers hold the codes of a row with this many columns."""
        return -(-columns * self.bits // (8 * self.file_dtype.itemsize))

    def read_codes(self, tensor: Tensor, columns: int, a: int, b: int) -> np.ndarray:
        """Read the codes of rows a to b."""
        stored: np.ndarray = tensor.read_raw(a, b, self.file_dtype).view(U8)[
            :, : -(-columns * self.bits // 8)
        ]
        return (stored ^ U8.type(128) if self.is_packed_in_words and self.bits == 8 else stored).view(
            self.dtype
        )

    def widen_codes(self, codes: np.ndarray, columns: int) -> np.ndarray:
        """Return the numbers of codes, from which no zeros are subtracted yet."""
        if self.bits == 8:
            return codes.astype(F32)
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)[:, :columns]
        return E2M1[halves] if self.scheme == "fp4" else halves.astype(F32)


FP8_CODES = CodeStorage("fp8", 8, FP8, frozenset({*FLOATS, "F8_E8M0"}))
FP4_CODES = CodeStorage("fp4", 4, U8, frozenset({*FLOATS, "F8_E4M3"}))
INT8_CODES = CodeStorage("int8", 8, I8, frozenset(FLOATS))
PACKED_INTEGERS = {bits: CodeStorage(f"int{bits}", bits, I32, frozenset(FLOATS)) for bits in PACKED_BITS}
STORAGE_BY_DTYPE = {"F8_E4M3": FP8_CODES, "U8": FP4_CODES, "I8": INT8_CODES}


@dataclass(frozen=True)
class WeightArgs:
    """Arguments of the weights in all groups of a `quantization_config`.

    blocks: rows and columns that share a scale. Those of one row divide the columns.
    packed_bits: bits of packed integers.
    has_zeros: True if all integers have zeros.
    """

    blocks: tuple[Block, ...] = ()
    packed_bits: tuple[int, ...] = PACKED_BITS
    has_zeros: bool = False

    def find_block(self, shape: tuple[int, int], scale: Tensor) -> Block:
        """Return the block of a matrix for which its scales have the right shape. Raises CheckpointError."""
        rows, columns = shape
        shapes: dict[tuple[int, ...], Block] = {}
        for m, n in self.blocks:
            if m > 1 or columns % n == 0:
                shapes[-(-rows // m), -(-columns // n)] = m, n
        shapes |= dict.fromkeys(((), (1,), (1, 1)), shape)
        shapes |= {(rows, 1): (1, columns), (rows,): (1, columns)}
        if scale.shape not in shapes:
            raise tensor_error(scale, f"floats of shape {' or '.join(map(str, shapes))}")
        return shapes[scale.shape]

    def find_storage(self, tensor: Tensor, parts: dict[str, Tensor]) -> tuple[CodeStorage, tuple[int, int]]:
        """Return how a tensor stores its codes, and the shape of the matrix. Raises CheckpointError."""
        if len(tensor.shape) != 2:
            raise tensor_error(tensor, "a matrix")
        rows, width = tensor.shape
        if tensor.code in STORAGE_BY_DTYPE:
            storage = STORAGE_BY_DTYPE[tensor.code]
            return storage, (rows, width * 8 // storage.bits)
        if tensor.code != "I32":
            raise tensor_error(tensor, "words of 32 bits, or bytes")
        shape = read_stated_shape(find_part(parts, tensor, "_shape"))
        for bits in self.packed_bits:
            if tensor.shape == (shape[0], PACKED_INTEGERS[bits].stored_width(shape[1])):
                return PACKED_INTEGERS[bits], shape
        raise tensor_error(
            tensor, f"words of {shape} integers in {' or '.join(map(str, self.packed_bits))} bits"
        )


def read_stated_shape(tensor: Tensor) -> tuple[int, int]:
    """Read the shape of a packed matrix. Raises CheckpointError unless it is two positive integers."""
    dtypes = {"I64": np.dtype(np.int64), "I32": I32}
    if tensor.shape != (2,) or tensor.code not in dtypes:
        raise tensor_error(tensor, "two integers")
    rows, columns = read_whole_tensor(tensor, dtypes[tensor.code]).tolist()
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} holds {rows} and {columns}, no shape")
    return rows, columns


@dataclass(frozen=True)
class BlockScaled(DerivedSource):
    """Matrix [o, i] of codes with scales: one in all, one a row, or one a block [ceil(o/m), ceil(i/n)].

    tensor: the codes.
    shape: of the matrix.
    storage: how the codes are stored.
    scale: the scales.
    block: m and n, the rows and columns that share a scale.
    zero_point: the zeros of integers, one for each scale, packed along the outputs if the codes are.
    g_idx: group of each input, if the groups' inputs are not neighbours.
    global_scale: one number for all scales.
    divides: True if scales are divided by the global one, as in compressed-tensors; ModelOpt multiplies.
    """

    tensor: Tensor
    shape: tuple[int, int]
    storage: CodeStorage
    scale: Tensor
    block: Block
    zero_point: Tensor | None = None
    g_idx: Tensor | None = None
    global_scale: Tensor | None = None
    divides: bool = False

    dtype = F32

    @classmethod
    def from_parts(
        cls, args: WeightArgs, name: str, tensor: Tensor, parts: dict[str, Tensor]
    ) -> "BlockScaled":
        """Return the matrix with its scales. Raises CheckpointError if they do not fit."""
        storage, shape = args.find_storage(tensor, parts)
        scale = find_part(parts, tensor, "_scale_inv", "_scale")
        zero_point, global_scale = parts.get("_zero_point"), None
        if args.has_zeros and storage.scheme in ("int4", "int8"):
            zero_point = find_part(parts, tensor, "_zero_point")
        if storage.scheme == "fp4":
            global_scale = find_part(parts, tensor, "_global_scale", "_scale_2")
        elif unread := {"_global_scale", "_scale_2"} & parts.keys():
            raise tensor_error(parts[min(unread)], "no global scale beside such codes")
        block = args.find_block(shape, scale)
        divides = "_global_scale" in parts
        weight = cls(
            name, tensor, shape, storage, scale, block, zero_point, parts.get("_g_idx"), global_scale, divides
        )
        weight.check_parts()
        return weight

    def check_parts(self) -> None:
        """Raise CheckpointError unless the parts fit each other."""
        if self.scale.code not in self.storage.scale_dtypes:
            raise tensor_error(self.scale, f"numbers in {' or '.join(sorted(self.storage.scale_dtypes))}")
        if self.zero_point is not None:
            self.check_zero_point(self.zero_point)
        if self.g_idx is not None and (self.g_idx.shape != self.shape[1:] or self.g_idx.code != "I32"):
            raise tensor_error(self.g_idx, f"32-bit integers of shape {self.shape[1:]}")
        if self.global_scale is not None and (
            self.global_scale.shape not in ((), (1,)) or self.global_scale.code not in FLOATS
        ):
            raise tensor_error(self.global_scale, "one float")

    def check_zero_point(self, tensor: Tensor) -> None:
        """Raise CheckpointError unless there is a zero for each scale."""
        shape, code = self.scale.shape, "I8"
        if self.storage.scheme not in ("int4", "int8"):
            raise tensor_error(tensor, "no zeros beside floats")
        if self.storage.is_packed_in_words:
            rows, columns = self.scale_shape
            shape, code = (self.storage.stored_width(rows), columns), "I32"
        if tensor.shape != shape or tensor.code != code:
            raise tensor_error(tensor, f"{code} of shape {shape}")

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Return how many blocks the rows and the columns have."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property  # not cached: a model may have 100,000 matrices
    def input_blocks(self) -> np.ndarray:
        """Return each input's block [i]. Raises CheckpointError for a block that does not exist."""
        blocks = np.arange(self.shape[1]) // self.block[1]
        if self.g_idx is None:
            return blocks
        groups, stated = read_whole_tensor(self.g_idx, I32), self.scale_shape[1]
        if (groups == -1).all():  # not set: the groups' inputs are neighbours
            return blocks
        if groups.min() < 0 or groups.max() >= stated:
            raise tensor_error(self.g_idx, f"numbers of groups, 0 to {stated - 1}")
        return groups

    def read_rows(self, a: int, b: int) -> np.ndarray:
        low, high = a // self.block[0], -(-b // self.block[0])
        values = self.storage.widen_codes(self.read_codes(a, b), self.shape[1])
        if self.storage.scheme in ("int4", "int8"):
            values -= self.spread_rows(self.read_zeros(low, high).astype(F32), a, b)
        return values * self.spread_rows(self.read_scales(low, high).astype(F32), a, b)

    def spread_rows(self, table: np.ndarray, a: int, b: int) -> np.ndarray:
        """Expand a table of the blocks that hold rows a to b to the numbers of these rows, [b-a, i]."""
        rows = table[np.arange(a, b) // self.block[0] - a // self.block[0]]
        if rows.shape[1] == 1:
            return rows
        if self.g_idx is None:  # faster than indices
            return np.repeat(rows, self.block[1], axis=1)[:, : self.shape[1]]
        return rows[:, self.input_blocks]

    def read_codes(self, a: int, b: int) -> np.ndarray:
        """Read the codes of rows a to b."""
        return self.storage.read_codes(self.tensor, self.shape[1], a, b)

    def read_scales(self, low: int, high: int) -> np.ndarray:
        """Read the scales of blocks of rows [high - low, blocks of columns]. They have their stored dtype, or
        float32 if there is a global scale."""
        scales = self.scale.read_raw(low, high, SCALE_DTYPES[self.scale.code])
        if self.global_scale is not None:
            with np.errstate(over="ignore"):
                scales = (np.divide if self.divides else np.multiply)(scales.astype(F32), self.global_factor)
        return check_finite_scales(self.scale, scales)

    @cached_property
    def global_factor(self) -> np.float32:
        """Read the global scale. Raises CheckpointError unless it is positive."""
        assert self.global_scale is not None, self
        factor = (
            check_finite_scales(self.global_scale, read_whole_tensor(self.global_scale)).astype(F32).item()
        )
        if factor <= 0:
            raise CheckpointError(
                f"{self.file}: tensor {self.global_scale.name!r} holds {factor}, expected a positive number"
            )
        return np.float32(factor)

    def read_zeros(self, low: int, high: int) -> np.ndarray:
        """Read the zeros of blocks of rows, in the codes' dtype."""
        if self.zero_point is None:
            return np.full((high - low, 1), ZERO_CODE if self.storage.bits == 4 else 0, self.storage.dtype)
        if not self.storage.is_packed_in_words:
            return self.zero_point.read_raw(low, high, I8)
        count = 32 // self.storage.bits
        words = self.zero_point.read_raw(low // count, -(-high // count), I32)
        integers = unpack_words(words, 0, self.storage.bits, range(count))[low % count :][: high - low]
        return (integers - (128 if self.storage.bits == 8 else 0)).astype(self.storage.dtype)

    def tensor_codes(self) -> TensorCodes:
        width = self.shape[1] * self.storage.bits // 8
        codes = CodesSource(self.name, self, (self.shape[0], width), self.storage.dtype, self.read_codes)
        blocks_of_rows = self.scale_shape[0]
        return TensorCodes(
            self.storage.scheme,
            codes,
            (np.arange(self.shape[0]) // self.block[0], self.input_blocks),
            F32 if self.global_scale is not None else SCALE_DTYPES[self.scale.code],
            partial(self.read_scales, 0, blocks_of_rows),
            None if self.zero_point is None else partial(self.read_zeros, 0, blocks_of_rows),
            packed_axis=1 if self.storage.bits == 4 else None,
        )
