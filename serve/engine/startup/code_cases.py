"""The kernels of products of codes, each with small arrays of the engine's own sizes and its reference."""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ....model.config import Dense, ModelConfig
from ....model.ffn import UNMAPPED_ACTIVATIONS, activation
from ....model.gpus import refusal_reason
from ....model.transformer import Decoder
from ....model.tree import paths_and_leaves
from ....model.weights.gpu.code_tiles import (
    CODE_PRODUCT_KERNEL,
    ROW_CODES_KERNEL,
    CodeMatrix,
    RowFunction,
    multiply_by_kernel,
    quantise_rows_by_kernel,
)
from ....model.weights.gpu.transposed_codes import (
    TransposedCodes,
    has_code_kernel,
    has_row_codes_kernel,
    multiply_codes_by_xla,
    return_row,
)
from ....model.weights.input_quantised import RowCodes, quantise_rows
from ....model.weights.lora import drop_lora
from ....model.weights.schemes import ACTIVATION_SCHEMES
from .kernel_case import KernelCase, must_interpret, random_normal

CHECKED_ROWS = 64, 3  # rows of tiles for one group of warps, and of small tiles


def code_cases(config: ModelConfig, params: Decoder, dtype: Any) -> Iterator[KernelCase]:
    """Yield the kernels of products that quantise their input; each size once."""
    leaves = paths_and_leaves(drop_lora(params), TransposedCodes)
    weights = [w for _, w in leaves if isinstance(w, TransposedCodes) and w.activations == "int8"]
    kinds = dict.fromkeys(kind.ffn for kind in config.layers if isinstance(kind.ffn, Dense))
    dense = [ffn for ffn in kinds if ffn.activation not in UNMAPPED_ACTIVATIONS]
    for inner in dict.fromkeys(prod(w.inputs) for w in weights):
        yield from row_codes_cases(inner, "", return_row, 1, dtype)
        for ffn in dense:
            if ffn.size == inner:
                name = f", {ffn.activation}"
                yield from row_codes_cases(inner, name, activation(ffn), 1 + ffn.gated, dtype)
    for shape in dict.fromkeys(w.weight.values.shape for w in weights):
        yield from product_cases(shape, dtype)


def row_codes_cases(
    inner: int, name: str, function: RowFunction, count: int, dtype: Any
) -> Iterator[KernelCase]:
    """Yield the case of the codes of three rows that a function makes of `count` arrays."""

    def make_inputs() -> tuple[Any, ...]:
        return tuple(random_normal(seed, (3, inner), dtype) for seed in range(count))

    def run(*inputs: Array) -> Array:
        return join_codes(quantise_rows_by_kernel(inputs, function, interpret=must_interpret()), dtype)

    @jax.jit
    def reference(*inputs: Array) -> Array:
        return join_codes(quantise_rows(function(*inputs), 1, ACTIVATION_SCHEMES["int8"]), dtype)

    if has_row_codes_kernel(jax.eval_shape(make_inputs)[0]):
        reason = refusal_reason(ROW_CODES_KERNEL)
        yield KernelCase(ROW_CODES_KERNEL, f"{inner}, {dtype}{name}", reason, make_inputs, run, reference)


def join_codes(rows: RowCodes, dtype: Any) -> Array:
    """Return the numbers that codes stand for."""
    return (rows.values.astype(jnp.float32) * rows.scales).astype(dtype)


def product_cases(shape: tuple[int, int], dtype: Any) -> Iterator[KernelCase]:
    """Yield the case of products with a matrix of codes, by itself and beside itself."""
    counts = CHECKED_ROWS[1:] if must_interpret() else CHECKED_ROWS

    def make_inputs() -> tuple[Any, ...]:
        rows = quantise_rows(random_normal(0, (counts[0], shape[1])), 1, ACTIVATION_SCHEMES["int8"])
        bits = jax.random.bits(jax.random.key(1), shape, jnp.uint8)
        return rows, CodeMatrix(bits.astype(jnp.int8), jnp.linspace(0.5, 1, shape[0]))

    def multiply(product: Any, rows: RowCodes, matrix: CodeMatrix) -> Array:
        some = [RowCodes(rows.values[:count], rows.scales[:count]) for count in counts]
        products = [product(x, own, dtype) for x in some for own in ((matrix,), (matrix, matrix))]
        return jnp.concatenate([x for parts in products for x in parts])

    kernel = partial(multiply_by_kernel, interpret=must_interpret())
    rows, matrix = jax.eval_shape(make_inputs)
    if has_code_kernel(rows, (matrix,)):
        yield KernelCase(
            CODE_PRODUCT_KERNEL,
            f"{'x'.join(map(str, shape))}, {dtype}",
            refusal_reason(CODE_PRODUCT_KERNEL),
            make_inputs,
            partial(multiply, kernel),
            jax.jit(partial(multiply, multiply_codes_by_xla)),
        )
