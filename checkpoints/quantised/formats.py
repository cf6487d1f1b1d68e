"""Formats of weights in four or eight bits whose codes are stored across the rows that are read. Each is a
`TensorSource` of floats that can also be read as codes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from ..tensors import FLOATS, Tensor
from .codes import CodesSource, DerivedSource, TensorCodes
from .parts import (
    E2M1,
    E8M0,
    F32,
    I8,
    I32,
    U8,
    LastRead,
    find_part,
    read_finite_scales,
    read_whole_tensor,
    tensor_error,
    unpack_words,
)

MXFP4_BLOCK = 32
GPTQ_BITS = (2, 4, 8)
ALL_INPUTS = -1  # value of group_size: one scale for all inputs of an output
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # index of the four bits of a word that hold each column


@dataclass(frozen=True)
class Mxfp4(DerivedSource):
    """Matrices of four-bit floats, one for each of E experts, read as [E, i, o].

    They are stored transposed: blocks [E, o, i/32, 16] of bytes, and exponents [E, o, i/32].

    tensor: the blocks.
    scales: the exponents.
    last_read: cache of the last expert that was read.
    """

    tensor: Tensor
    scales: Tensor
    last_read: LastRead = field(compare=False)

    dtype = F32

    @classmethod
    def from_parts(cls, last_read: LastRead, name: str, blocks: Tensor, parts: dict[str, Tensor]) -> "Mxfp4":
        """Return the blocks with their exponents. Raises CheckpointError if they do not fit."""
        scales = find_part(parts, blocks, "_scales")
        if len(blocks.shape) != 4 or blocks.shape[-1] * 2 != MXFP4_BLOCK or blocks.code != "U8":
            raise tensor_error(blocks, f"bytes of shape (experts, outputs, blocks, {MXFP4_BLOCK // 2})")
        if scales.shape != blocks.shape[:-1] or scales.code != "U8":
            raise tensor_error(scales, f"bytes of shape {blocks.shape[:-1]}")
        return cls(name, blocks, scales, last_read)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, count, _ = self.tensor.shape
        return experts, count * MXFP4_BLOCK, outputs

    def read_rows(self, a: int, b: int) -> np.ndarray:
        return self.read_expert_rows(a, b, self.shape[1], self.read_inputs)

    def read_expert_rows(
        self, a: int, b: int, rows_per_expert: int, read: Callable[[int, int, int], np.ndarray]
    ) -> np.ndarray:
        """Return rows a to b over all experts, from `read` (expert, a, b); each expert has `rows_per_expert`
        rows."""
        experts = range(a // rows_per_expert, -(-b // rows_per_expert))
        pieces = [
            read(e, max(a - e * rows_per_expert, 0), min(b - e * rows_per_expert, rows_per_expert))
            for e in experts
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_inputs(self, expert: int, a: int, b: int) -> np.ndarray:
        """Read inputs a to b of one expert, [b-a, o]."""
        packed, exponents = self.read_expert(expert)
        low, high = a // 2, -(-b // 2)
        pairs = packed[:, low:high]
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
        scales = np.exp2(exponents[:, np.arange(a, b) // MXFP4_BLOCK].astype(np.float32) - 127)
        return np.ascontiguousarray((E2M1[codes[:, a - 2 * low : b - 2 * low]] * scales).T)

    def tensor_codes(self) -> TensorCodes:
        experts, inputs, outputs = self.shape

        def read_fp4_codes(e: int, a: int, b: int) -> np.ndarray:
            return np.ascontiguousarray(self.read_expert(e)[0][:, a:b].T)

        half = inputs // 2
        shape = experts, half, outputs
        values = CodesSource(
            self.name, self, shape, U8, lambda a, b: self.read_expert_rows(a, b, half, read_fp4_codes)
        )
        blocks = np.arange(experts), np.arange(inputs) // MXFP4_BLOCK, np.arange(outputs)
        return TensorCodes("fp4", values, blocks, E8M0, self.read_scales, packed_axis=1)

    def read_scales(self) -> np.ndarray:
        """Read every block's power of two, [E, i/32, o]."""
        return read_finite_scales(replace(self.scales, code="F8_E8M0")).transpose(0, 2, 1)

    def read_expert(self, e: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes [o, i/2] and exponents [o, i/32] of an expert."""
        _, outputs, count, _ = self.tensor.shape
        bytes_of = partial(self.tensor.read_raw, e * outputs * count, (e + 1) * outputs * count, U8)
        packed = self.last_read.get_or_read((self.name, e), bytes_of).reshape(outputs, -1)
        return packed, self.scales.read_raw(e * outputs, (e + 1) * outputs, U8)


@dataclass(frozen=True)
class Packing:
    """Packing of integers in 32-bit words: along the inputs for GPTQ, along the outputs in AWQ_ORDER for AWQ.

    bits: of an integer.
    is_awq: True for AWQ.
    zero_shift: is added to stored zeros.
    group_size: how many inputs share a scale, or ALL_INPUTS.
    """

    bits: int
    is_awq: bool
    zero_shift: int
    group_size: int

    @property
    def ints_per_word(self) -> int:
        """Return how many integers a word holds."""
        return 32 // self.bits

    def infer_bits(self, qweight: Tensor, g_idx: Tensor | None) -> "Packing":
        """Return the packing of one matrix, whose bits may differ: GPTQModel's `dynamic` sets them for each
        module.

        `g_idx` has an entry for each input, so the number of words gives the bits.
        """
        rows, inputs = qweight.shape[0], g_idx.shape[0] if g_idx is not None and g_idx.shape else 0
        bits = next((bits for bits in GPTQ_BITS if rows * (32 // bits) == inputs), self.bits)
        return replace(self, bits=bits)

    def unpack(self, words: np.ndarray, axis: int) -> np.ndarray:
        """Return the integers along an axis of words."""
        return unpack_words(words, axis, self.bits, AWQ_ORDER if self.is_awq else range(self.ints_per_word))


@dataclass(frozen=True)
class PackedWeight(DerivedSource):
    """AWQ or GPTQ matrix, (q - zero) * scale, that is stored with its inputs first and read as [outputs,
    inputs].

    tensor: the packed words.
    qzeros: packed zeros of each group of inputs and each output.
    scales: of each group and output.
    g_idx: group of each input, for GPTQ that orders inputs by their activations; None for inputs in order.
    packing: layout of the integers in the words.
    last_read: cache of the last matrix that was unpacked.
    """

    tensor: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None
    packing: Packing
    last_read: LastRead = field(compare=False)

    dtype = F32

    @classmethod
    def from_parts(
        cls, last_read: LastRead, packing: Packing, name: str, qweight: Tensor, parts: dict[str, Tensor]
    ) -> "PackedWeight":
        """Return the matrix with its zeros and scales. Raises CheckpointError if they do not fit."""
        zeros, scales = find_part(parts, qweight, ".qzeros"), find_part(parts, qweight, ".scales")
        if len(qweight.shape) != 2 or qweight.code != "I32":
            raise tensor_error(qweight, "a matrix of 32-bit words")
        g_idx = parts.get(".g_idx")
        weight = cls(name, qweight, zeros, scales, g_idx, packing.infer_bits(qweight, g_idx), last_read)
        weight.check_parts()
        return weight

    def check_parts(self) -> None:
        """Raise CheckpointError unless the parts fit each other."""
        outputs, inputs = self.shape
        groups = 1 if self.packing.group_size == ALL_INPUTS else -(-inputs // self.packing.group_size)
        if self.g_idx is not None and self.scales.shape[1:]:
            groups = self.scales.shape[0]
        if self.scales.shape != (groups, outputs) or self.scales.code not in FLOATS:
            raise tensor_error(self.scales, f"floats of shape {(groups, outputs)}")
        zeros = (groups, -(-outputs // self.packing.ints_per_word))
        if self.qzeros.shape != zeros or self.qzeros.code != "I32":
            raise tensor_error(self.qzeros, f"32-bit words of shape {zeros}")
        if self.g_idx is not None:
            if self.g_idx.shape != (inputs,) or self.g_idx.code != "I32":
                raise tensor_error(self.g_idx, f"32-bit integers of shape {(inputs,)}")
            indices = read_whole_tensor(self.g_idx, I32)
            if indices.min() < 0 or indices.max() >= groups:
                raise tensor_error(self.g_idx, f"numbers of groups, 0 to {groups - 1}")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.tensor.shape
        return (columns * 8, rows) if self.packing.is_awq else (columns, rows * self.packing.ints_per_word)

    def read_rows(self, a: int, b: int) -> np.ndarray:
        _, zeros, scales = self.read_parts()
        numbers = (self.read_integers(a, b) - zeros[self.input_groups, a:b]) * scales[
            self.input_groups, a:b
        ].astype(F32)
        return np.ascontiguousarray(numbers.T, F32)

    def read_integers(self, a: int, b: int) -> np.ndarray:
        """Return the stored integers of outputs a to b, [i, b-a]."""
        words, *_ = self.read_parts()
        if not self.packing.is_awq:
            return self.packing.unpack(words[:, a:b], 0)
        low, high = a // self.packing.ints_per_word, -(-b // self.packing.ints_per_word)
        start = low * self.packing.ints_per_word
        return self.packing.unpack(words[:, low:high], 1)[:, a - start : b - start]

    def tensor_codes(self) -> TensorCodes:
        (outputs, inputs), is_int8 = self.shape, self.packing.bits == 8
        dtype, offset = (I8, 128) if is_int8 else (U8, 0)  # int8 codes are stored as integers less 128
        shape, rows = (
            ((outputs, inputs), self.read_int8_codes)
            if is_int8
            else ((outputs, inputs // 2), self.read_int4_codes)
        )
        return TensorCodes(
            "int8" if is_int8 else "int4",
            CodesSource(self.name, self, shape, dtype, rows),
            (np.arange(outputs), self.input_groups),
            FLOATS[self.scales.code],
            read_scales=lambda: self.read_parts()[2].T,
            read_zeros=lambda: (self.read_parts()[1].T - offset).astype(dtype),
            packed_axis=None if is_int8 else 1,
        )

    def read_int8_codes(self, a: int, b: int) -> np.ndarray:
        """Return the integers of outputs a to b less 128, as signed bytes [b-a, i]."""
        return np.ascontiguousarray((self.read_integers(a, b).T - 128).astype(I8))

    def read_int4_codes(self, a: int, b: int) -> np.ndarray:
        """Return outputs a to b with two neighbouring inputs in a byte, [b-a, i/2]."""
        q = self.read_integers(a, b)
        return np.ascontiguousarray((q[0::2] | q[1::2] << 4).T, U8)

    @cached_property
    def input_groups(self) -> np.ndarray:
        """Return each input's group [i]."""
        inputs = self.shape[1]
        if self.g_idx is not None:
            return read_whole_tensor(self.g_idx, I32)
        return np.arange(inputs) // (
            inputs if self.packing.group_size == ALL_INPUTS else self.packing.group_size
        )

    def read_parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the packed words, integer zeros [groups, o] and scales [groups, o]; the last ones read are
        cached."""
        return self.last_read.get_or_read(self.name, self.unpack_parts)

    def unpack_parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read and unpack zeros and scales, and read the packed words."""
        zeros = self.packing.unpack(read_whole_tensor(self.qzeros, I32), 1)[:, : self.shape[0]]
        zeros = (zeros + self.packing.zero_shift) & ((1 << self.packing.bits) - 1)
        return read_whole_tensor(self.tensor, I32), zeros, read_finite_scales(self.scales)
