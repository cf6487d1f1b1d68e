"""What a product takes by duetto's CPU kernels, by the form of its weight: microseconds of one thread's
processor.

    python benchmarks/studies/cpu_products.py [--turns 9] [--rows 1 8 32 512] [--sizes 576x1536 960x2560]

Prints a markdown table of medians, of forms in turns. After an x are activations in codes, whose coding is
included. A turn is a compiled loop over different rows, so it calls the kernels as a step does. The weight
stays in the caches that have room for it.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA makes its threads

import jax
import jax.numpy as jnp
import numpy as np

from duetto.cpu_kernels.build import build_cached_library
from duetto.cpu_kernels.library import ffi_target_name, load_library
from duetto.model.weights.cpu.panels import Packed, pack_codes, pack_matrix
from duetto.model.weights.quant import quantise_weight

FORMS = "bfloat16", "int8", "int4", "int8 x int8", "int4 x int8"
PRODUCTS_OF_A_TURN = 1 << 27  # multiplications and additions, at least those of one product
MOST_CALLS = 256


def packed_weight(form: str, inputs: int, outputs: int, target: str) -> Packed:
    """A random weight in a form."""
    matrix = jnp.asarray(np.random.default_rng(1).standard_normal((inputs, outputs)), jnp.bfloat16)
    if form == "bfloat16":
        return pack_matrix(matrix.T, (inputs,), (outputs,), target)
    scheme, _, activations = form.partition(" x ")
    weight = quantise_weight(matrix, (-2,), scheme)
    assert weight is not None
    return pack_codes(weight, 1, target, activations or None)


@jax.jit
def multiply_each(rows: jax.Array, weight: Packed) -> jax.Array:
    """The last of the products of rows [calls,M,K], which are computed one after the other."""

    def multiply(i: Any, _: jax.Array) -> jax.Array:
        return weight.einsum("md,df->mf", jax.lax.dynamic_index_in_dim(rows, i, keepdims=False))

    zeros = jnp.zeros((rows.shape[1], *weight.outputs), rows.dtype)
    return jax.lax.fori_loop(0, len(rows), multiply, zeros)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def medians(inputs: int, outputs: int, rows: int, turns: int, target: str) -> list[float]:
    """Microseconds of one product by each form."""
    calls = min(max(PRODUCTS_OF_A_TURN // (inputs * outputs * rows), 1), MOST_CALLS)
    x = np.random.default_rng(0).standard_normal((calls, rows, inputs)).astype(jnp.bfloat16)
    weights = [packed_weight(form, inputs, outputs, target) for form in FORMS]
    runs = [partial(multiply_each, jnp.asarray(x), weight) for weight in weights]
    for run in runs:
        seconds_of(run)
    found = [[seconds_of(run) for run in runs] for _ in range(turns)]
    return [statistics.median(each) / calls * 1e6 for each in zip(*found, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32, 512))
    parser.add_argument("--sizes", nargs="+", default=("576x1536", "960x2560"), metavar="INPUTSxOUTPUTS")
    options = parser.parse_args(arguments)
    if not load_library().isas:
        build_cached_library()
    library = load_library()
    target = ffi_target_name("product", library.isa)
    print(f"{library.isa}, microseconds on one thread, and how many times as fast as bfloat16\n")
    print(f"| product | rows | {' | '.join(FORMS)} |\n|{'---|' * (len(FORMS) + 2)}")
    for size in options.sizes:
        inputs, outputs = map(int, size.split("x"))
        for rows in options.rows:
            first, *others = medians(inputs, outputs, rows, options.turns, target)
            cells = [f"{first:,.0f}", *(f"{found:,.0f} ({first / found:.2f})" for found in others)]
            print(f"| {size} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
