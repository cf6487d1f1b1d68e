"""What the sampler's bits cost a trainer: a training step, forward and backward, with `token_logprobs` on CPU
kernels, or by a replay of an engine's steps, beside the same step by XLA's products.

    python benchmarks/studies/training.py [--shape 135m] [--dtype float32] [--texts 4] [--way kernels]
    python benchmarks/studies/training.py --way replay --target h200 --shape 8b --layers 2 --tokens 257

Prints a row of results as JSON. Masters are float32, and cast in the loss. The first half of a replayed text
is its prompt. Times are medians of single steps, the two ways in turns; the ratio is the median over the
rounds. With a target the steps are compiled for a device that is not here, and a replay's loops count once:
its row has the bytes of one decode, and of one chunk of each text.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params, shapes_from_specs
from duetto.model.weights.device_forms import DeviceForms
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.planner.roofline.targets import compiler_options, find_target, target_lowering
from duetto.train.checks import find_kernel_isa
from duetto.train.engine_steps import EngineSteps
from duetto.train.logprobs import Score, ServedModel
from duetto.train.scoring import score_by_kernels, score_by_xla

CPU_STEPS = EngineSteps(8, 64, 64, DeviceForms())
H200_STEPS = EngineSteps(64, 512, 64, DeviceForms(fuse_qkv=True, fixed_tiles=True))


def make_gradient(args: argparse.Namespace, score: Score) -> Any:
    """Return the gradient of a loss by masters, for drawn texts."""
    config = make_config(args)
    drawn = jax.random.randint(jax.random.key(1), (args.texts, args.tokens), 0, config.vocab_size, jnp.int32)
    prompt_lengths = jnp.full(args.texts, args.tokens // 2, jnp.int32)
    compute = ServedModel(config, jnp.dtype(args.dtype), score).token_logprobs
    return jax.value_and_grad(
        lambda masters: -jnp.mean(compute(masters, drawn, prompt_lengths=prompt_lengths))
    )


def make_config(args: argparse.Namespace) -> Any:
    config = PRESETS[args.shape]
    return replace(config, layers=config.layers[: args.layers])


def choose_scores(args: argparse.Namespace) -> dict[str, Score]:
    """Return the two ways that are compared."""
    plain: dict[str, Score] = {"plain": score_by_xla}
    if args.way == "replay":
        return plain | {"replay": (H200_STEPS if args.target else CPU_STEPS).score}
    config = make_config(args)
    shapes = shapes_from_specs(decoder_spec(config), jnp.dtype(args.dtype))
    return plain | {"kernels": partial(score_by_kernels, isa=find_kernel_isa(config, shapes))}


def time_steps(steps: dict[str, Any], masters: Any, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, after one round that is not counted."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds + 1):
        for way, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(masters))
            times[way].append(time.perf_counter() - start)
    return {way: seconds[1:] for way, seconds in times.items()}


def gradient_distance(steps: dict[str, Any], masters: Any) -> float:
    """Return the relative error of the exact step's gradient, beside the plain step's."""
    plain, exact = (jax.tree.leaves(step(masters)[1]) for step in steps.values())
    pairs = [(jnp.sum((a - b) ** 2), jnp.sum(b**2)) for a, b in zip(exact, plain, strict=True)]
    return float(jnp.sqrt(sum(a for a, _ in pairs) / sum(b for _, b in pairs)))


def measure_here(args: argparse.Namespace) -> dict[str, Any]:
    """Run both ways in turns."""
    masters = init_params(jax.random.key(0), decoder_spec(make_config(args)))
    steps, compiled = {}, {}
    for way, score in choose_scores(args).items():
        start = time.perf_counter()
        steps[way] = jax.jit(make_gradient(args, score)).lower(masters).compile()
        compiled[way] = round(time.perf_counter() - start, 1)
    plain, exact = (times := time_steps(steps, masters, args.rounds)).values()
    ratios = [a / b for a, b in zip(exact, plain, strict=True)]
    return {
        "step_seconds": {way: round(statistics.median(seconds), 3) for way, seconds in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "compile_seconds": compiled,
        "temporary_mib": {
            way: step.memory_analysis().temp_size_in_bytes >> 20 for way, step in steps.items()
        },
        "gradient_distance": float(f"{gradient_distance(steps, masters):.2e}"),
    }


def describe_for_target(args: argparse.Namespace) -> dict[str, Any]:
    """Compile both ways for a device, and describe the programs."""
    target = find_target(args.target)
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    masters = shapes_from_specs(decoder_spec(make_config(args)), jnp.float32, sharding)
    rows = {}
    for way, score in choose_scores(args).items():
        with target_lowering(target):
            lowered = jax.jit(make_gradient(args, score), out_shardings=sharding).lower(masters)
        facts = read_program_facts(lowered.compile(compiler_options={**compiler_options(target)}))
        assert target.peaks is not None
        rows[way] = {
            "gib": round(facts.bytes / 2**30, 1),
            "floor_ms": round(1e3 * facts.bytes / target.peaks.bandwidth, 1),
            "temporary_gib": round(facts.temporaries / 2**30, 1),
        }
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--way", default="kernels", choices=("kernels", "replay"))
    parser.add_argument("--target")
    args = parser.parse_args()
    row = describe_for_target(args) if args.target else measure_here(args)
    print(json.dumps(vars(args) | row | {"jax": jax.__version__}))
