"""What adapters cost a step of decode on this machine: of eight rows, without room for adapters, with room
that nobody uses, and with one and three that the rows have.

    python benchmarks/adapters.py [--shape 135m] [--rank 16] [--dtype float32] [--rounds 15]

Prints a markdown table. Every weight that may have an adapter has one; times are medians of groups of steps,
the ways in turns, in brackets the median over the rounds of what a way takes of the time without.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from duetto.model.tree import init_params
from duetto.model.weights.compression.compress import form_spec
from duetto.model.weights.lora import NO_ADAPTER, AdapterSizes
from duetto.model.weights.transposed import transpose_params
from duetto.serve.cli.bench import Bench, BenchModel, group_seconds
from duetto.serve.engine.lora.writer import add_lora_slots
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Shape

ROWS, CONTEXT, STEPS = 8, 128, 4
# adapters that there is room for, and that the rows have
WAYS = {"none": (0, 0), "room for 1": (1, 0), "1": (1, 1), "room for 3": (3, 0), "3": (3, 3)}


def benches(shape: str, rank: int, dtype: str) -> dict[str, Bench]:
    """A step for each way, over the same weights."""
    config = PRESETS[shape]
    params = transpose_params(
        init_params(jax.random.key(0), form_spec(config, None), jnp.dtype(dtype)), donate=True
    )
    rooms = {
        n: add_lora_slots(params, config, AdapterSizes(n, rank)) for n in {n for n, _ in WAYS.values() if n}
    }
    found = {}
    for name, (places, used) in WAYS.items():
        own = rooms.get(places, params)
        bench = Bench(BenchModel(shape, config, own, EngineOptions()), Shape("decode", ROWS, 1), CONTEXT)
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        adapter = rows % used if used else 0 * rows + NO_ADAPTER
        bench.state = replace(bench.state, slots=replace(bench.state.slots, adapter=adapter))
        found[name] = bench
    return found


def seconds(ways: dict[str, Bench], rounds: int) -> dict[str, list[float]]:
    for bench in ways.values():
        jax.block_until_ready(bench.step())
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, bench in ways.items():
            found[name].append(group_seconds(bench.step, STEPS))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="135m", choices=PRESETS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    found = seconds(benches(args.shape, args.rank, args.dtype), args.rounds)
    print("| adapters | ms a step | |\n|---|---|---|")
    for name, own in found.items():
        ratio = statistics.median(x / plain for x, plain in zip(own, found["none"], strict=True))
        print(f"| {name} | {1e3 * statistics.median(own):.1f} | ({ratio:.2f} x) |")


if __name__ == "__main__":
    main()
