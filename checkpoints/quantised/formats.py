"""The formats in which checkpoints store weights in eight or four bits, each a `Source` of floats that can
also be read as its codes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np

from ..tensors import FLOATS, CheckpointError, Tensor, is_finite
from .codes import CodesSource, DerivedSource, TensorCodes

F32, I32, I8, U8 = (np.dtype(t) for t in (np.float32, np.int32, np.int8, np.uint8))
FP8, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
SCALES = FLOATS | {"F8_E8M0": E8M0}
MXFP4_BLOCK = 32
ALL_INPUTS = -1  # a group_size: one scale for all inputs of an output
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word hold its columns, one after the other


class LastRead:
    """Cache of the last tensor or expert that was read: rows are read piece after piece, and some formats
    store them crosswise."""

    def __init__(self):
        self.key: Any = None
        self.found: Any = None

    def get(self, key: Any, read: Callable[[], Any]) -> Any:
        if key != self.key:
            self.key, self.found = key, read()
        return self.found


def refuse(tensor: Tensor, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.code} and shape {tensor.shape}, "
        f"expected {expected}"
    )


def part(beside: Mapping[str, Tensor], main: Tensor, *names: str) -> Tensor:
    """The one of these parts that is there."""
    found = [beside[name] for name in names if name in beside]
    if len(found) > 1:
        raise CheckpointError(
            f"{main.file}: tensor {main.name!r} has {' and '.join(names)} beside it, expected one"
        )
    if not found:
        raise CheckpointError(f"{main.file}: tensor {main.name!r} has no {' or '.join(names)} beside it")
    return found[0]


def whole(tensor: Tensor, dtype: np.dtype | None = None) -> np.ndarray:
    """All of a tensor, as floats or in another dtype."""
    dtype = SCALES[tensor.code] if dtype is None else dtype
    return tensor.raw(
        0, int(np.prod(tensor.shape[:-1] if tensor.shape[1:] else tensor.shape)), dtype
    ).reshape(tensor.shape)


def scales_of(tensor: Tensor) -> np.ndarray:
    """All of a tensor's floats. Raises CheckpointError where one is not finite."""
    found = whole(tensor)
    if not is_finite(found.astype(F32)):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} holds NaN or infinity, expected finite numbers"
        )
    return found


@dataclass(frozen=True)
class BlockScaled(DerivedSource):
    """An FP8 matrix [o,i] and float scales: one in all, one a row [o,1], or one for each block [ceil(o/m),
    ceil(i/n)]."""

    of: Tensor
    scale: Tensor
    block: tuple[int, int]

    dtype = F32

    @classmethod
    def joined(
        cls, block: tuple[int, int] | None, name: str, weight: Tensor, beside: dict[str, Tensor]
    ) -> "BlockScaled":
        scale = part(beside, weight, "_scale_inv", "_scale")
        if len(weight.shape) != 2:
            raise refuse(weight, "a matrix")
        rows, columns = weight.shape
        shapes: dict[tuple[int, ...], tuple[int, int]] = dict.fromkeys(((), (1,), (1, 1)), (rows, columns))
        shapes |= {(rows, 1): (1, columns), (rows,): (1, columns)}
        if block:
            shapes = {(-(-rows // block[0]), -(-columns // block[1])): block}
        if scale.code not in SCALES or scale.shape not in shapes:
            raise refuse(scale, f"floats of shape {' or '.join(map(str, shapes))}")
        return cls(name, weight, scale, shapes[scale.shape])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def rows(self, a: int, b: int) -> np.ndarray:
        values = self.of.raw(a, b, FP8).astype(F32)
        scales = self.scales().astype(F32)[np.arange(a, b) // self.block[0]]
        return values * np.repeat(scales, self.block[1], axis=1)[:, : values.shape[1]]

    def scales(self) -> np.ndarray:
        return scales_of(self.scale).reshape(-(-self.shape[0] // self.block[0]), -1)

    def codes(self) -> TensorCodes:
        blocks = tuple(np.arange(size) // block for size, block in zip(self.shape, self.block, strict=True))
        values = CodesSource(self.name, self, self.shape, FP8, lambda a, b: self.of.raw(a, b, FP8))
        return TensorCodes("fp8", values, blocks, SCALES[self.scale.code], self.scales)


@dataclass(frozen=True)
class Mxfp4(DerivedSource):
    """E matrices of four-bit floats, stored crosswise as blocks [E,o,i/32,16] with exponents [E,o,i/32]: read
    as [E,i,o]."""

    of: Tensor  # the blocks
    scales: Tensor
    held: LastRead = field(compare=False)

    dtype = F32

    @classmethod
    def joined(cls, held: LastRead, name: str, blocks: Tensor, beside: dict[str, Tensor]) -> "Mxfp4":
        scales = part(beside, blocks, "_scales")
        if len(blocks.shape) != 4 or blocks.shape[-1] * 2 != MXFP4_BLOCK or blocks.code != "U8":
            raise refuse(blocks, f"bytes of shape (experts, outputs, blocks, {MXFP4_BLOCK // 2})")
        if scales.shape != blocks.shape[:-1] or scales.code != "U8":
            raise refuse(scales, f"bytes of shape {blocks.shape[:-1]}")
        return cls(name, blocks, scales, held)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, count, _ = self.of.shape
        return experts, count * MXFP4_BLOCK, outputs

    def rows(self, a: int, b: int) -> np.ndarray:
        return self.across(a, b, self.shape[1], self.inputs)

    def across(self, a: int, b: int, each: int, rows: Callable[[int, int, int], np.ndarray]) -> np.ndarray:
        """Rows a to b, of which an expert has `each`, from `rows` (expert, a, b)."""
        experts = range(a // each, -(-b // each))
        pieces = [rows(e, max(a - e * each, 0), min(b - e * each, each)) for e in experts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def inputs(self, expert: int, a: int, b: int) -> np.ndarray:
        """Inputs a to b of one expert, [b-a,o]."""
        packed, exponents = self.expert(expert)
        low, high = a // 2, -(-b // 2)
        pairs = packed[:, low:high]
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
        scales = np.exp2(exponents[:, np.arange(a, b) // MXFP4_BLOCK].astype(np.float32) - 127)
        return np.ascontiguousarray((E2M1[codes[:, a - 2 * low : b - 2 * low]] * scales).T)

    def codes(self) -> TensorCodes:
        experts, inputs, outputs = self.shape

        def pairs(e: int, a: int, b: int) -> np.ndarray:
            return np.ascontiguousarray(self.expert(e)[0][:, a:b].T)

        half = inputs // 2
        shape = experts, half, outputs
        values = CodesSource(self.name, self, shape, U8, lambda a, b: self.across(a, b, half, pairs))
        blocks = np.arange(experts), np.arange(inputs) // MXFP4_BLOCK, np.arange(outputs)
        return TensorCodes("fp4", values, blocks, E8M0, self.powers, packed=1)

    def powers(self) -> np.ndarray:
        """Every block's power of two, [E,i/32,o]."""
        return scales_of(replace(self.scales, code="F8_E8M0")).transpose(0, 2, 1)

    def expert(self, e: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes [o,i/2] and exponents [o,i/32] of an expert."""
        _, outputs, count, _ = self.of.shape
        bytes_of = partial(self.of.raw, e * outputs * count, (e + 1) * outputs * count, U8)
        packed = self.held.get((self.name, e), bytes_of).reshape(outputs, -1)
        return packed, self.scales.raw(e * outputs, (e + 1) * outputs, U8)


@dataclass(frozen=True)
class Packing:
    """Packing of integers in 32-bit words: AWQ's along the outputs in an order of its own, GPTQ's along the
    inputs."""

    bits: int
    awq: bool
    shift: int  # what stored zeros lack
    group: int  # inputs that share a scale, or ALL_INPUTS

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def unpack(self, words: np.ndarray, axis: int) -> np.ndarray:
        """Integers along an axis of words."""
        order = AWQ_ORDER if self.awq else range(self.per_word)
        mask = np.uint32((1 << self.bits) - 1)
        fields = [(words.view(np.uint32) >> np.uint32(i * self.bits)) & mask for i in order]
        shape = list(words.shape)
        shape[axis] *= self.per_word
        return np.stack(fields, axis=axis + 1).reshape(shape).astype(np.int32)


@dataclass(frozen=True)
class PackedWeight(DerivedSource):
    """An AWQ or GPTQ matrix, (q - zero) * scale, which is stored with its inputs first: read as [outputs,
    inputs].

    GPTQ may order inputs by their activations: `g_idx` then has each one's group.
    """

    of: Tensor  # the packed words
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None
    packing: Packing
    held: LastRead = field(compare=False)

    dtype = F32

    @classmethod
    def joined(
        cls, held: LastRead, packing: Packing, name: str, qweight: Tensor, beside: dict[str, Tensor]
    ) -> "PackedWeight":
        zeros, scales = part(beside, qweight, ".qzeros"), part(beside, qweight, ".scales")
        found = cls(name, qweight, zeros, scales, beside.get(".g_idx"), packing, held)
        found.check()
        return found

    def check(self) -> None:
        """Raise CheckpointError unless the parts fit each other."""
        if len(self.of.shape) != 2 or self.of.code != "I32":
            raise refuse(self.of, "a matrix of 32-bit words")
        outputs, inputs = self.shape
        groups = 1 if self.packing.group == ALL_INPUTS else -(-inputs // self.packing.group)
        if self.scales.shape != (groups, outputs) or self.scales.code not in FLOATS:
            raise refuse(self.scales, f"floats of shape {(groups, outputs)}")
        zeros = (groups, -(-outputs // self.packing.per_word))
        if self.qzeros.shape != zeros or self.qzeros.code != "I32":
            raise refuse(self.qzeros, f"32-bit words of shape {zeros}")
        if self.g_idx is not None:
            if self.g_idx.shape != (inputs,) or self.g_idx.code != "I32":
                raise refuse(self.g_idx, f"32-bit integers of shape {(inputs,)}")
            found = whole(self.g_idx, I32)
            if found.min() < 0 or found.max() >= groups:
                raise refuse(self.g_idx, f"numbers of groups, 0 to {groups - 1}")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.of.shape
        return (columns * 8, rows) if self.packing.awq else (columns, rows * self.packing.per_word)

    def rows(self, a: int, b: int) -> np.ndarray:
        _, zeros, scales = self.read()
        numbers = (self.integers(a, b) - zeros[self.group, a:b]) * scales[self.group, a:b].astype(F32)
        return np.ascontiguousarray(numbers.T, F32)

    def integers(self, a: int, b: int) -> np.ndarray:
        """Stored integers of outputs a to b, [i,b-a]."""
        words, *_ = self.read()
        if not self.packing.awq:
            return self.packing.unpack(words[:, a:b], 0)
        low, high = a // self.packing.per_word, -(-b // self.packing.per_word)
        start = low * self.packing.per_word
        return self.packing.unpack(words[:, low:high], 1)[:, a - start : b - start]

    def codes(self) -> TensorCodes:
        (outputs, inputs), eight = self.shape, self.packing.bits == 8
        dtype, less = (I8, 128) if eight else (U8, 0)  # signed bytes hold integers less 128
        shape, rows = ((outputs, inputs), self.bytes) if eight else ((outputs, inputs // 2), self.pairs)
        return TensorCodes(
            "int8" if eight else "int4",
            CodesSource(self.name, self, shape, dtype, rows),
            (np.arange(outputs), self.group),
            FLOATS[self.scales.code],
            scales=lambda: self.read()[2].T,
            zeros=lambda: (self.read()[1].T - less).astype(dtype),
            packed=None if eight else 1,
        )

    def bytes(self, a: int, b: int) -> np.ndarray:
        return np.ascontiguousarray((self.integers(a, b).T - 128).astype(I8))

    def pairs(self, a: int, b: int) -> np.ndarray:
        """Neighbouring inputs of outputs a to b in one byte each, [b-a,i/2]."""
        q = self.integers(a, b)
        return np.ascontiguousarray((q[0::2] | q[1::2] << 4).T, U8)

    @cached_property
    def group(self) -> np.ndarray:
        """Each input's group [i]."""
        inputs = self.shape[1]
        if self.g_idx is not None:
            return whole(self.g_idx, I32)
        return np.arange(inputs) // (inputs if self.packing.group == ALL_INPUTS else self.packing.group)

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The packed words, integer zeros [groups,o] and scales [groups,o]: what was read last is held."""
        return self.held.get(self.name, self.read_whole)

    def read_whole(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        zeros = self.packing.unpack(whole(self.qzeros, I32), 1)[:, : self.shape[0]]
        zeros = (zeros + self.packing.shift) & ((1 << self.packing.bits) - 1)
        return whole(self.of, I32), zeros, scales_of(self.scales)
