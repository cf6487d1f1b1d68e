"""What `duetto plan` says where feed-forward layers lie apart: each part's memory, who waits for whom, and
whether it pays against one layout of as many devices in which all attend."""

import math
from dataclasses import asdict
from typing import Any, NamedTuple

import jax.numpy as jnp

from ...kvcache.stages import attending, devices, feeding
from ...model.pair import PairConfig, target_of
from ...model.sharding import device_bytes
from ...model.transformer import decoder_spec
from ...model.tree import nbytes, paths
from ..runtime.compiled.compile import StepArguments
from ..runtime.compiled.sizing import scratch_bytes, widened_bytes
from .planning import EnginePlan, MemoryPlan
from .roofline.halves import Cluster, Decode, Sides

MICRO_BATCHES = 1, 2, 3, 4
LIMIT = 0.05  # seconds between a row's tokens, in the comparison


class HalfPlan(NamedTuple):
    """A part's number of devices, and the memory of each."""

    name: str
    devices: int
    memory: MemoryPlan


class Turns(NamedTuple):
    """Decode of all seats in micro-batches of some rows: seconds of one in either part and on the links,
    between a row's tokens, and tokens a second."""

    micro_batches: int
    rows: int
    attention: float
    ffn: float
    links: float
    seconds: float
    rate: float


def parts(plan: EnginePlan, arguments: StepArguments) -> list[HalfPlan]:
    """Temporaries are upper estimates, of a whole step's in either part."""
    params, limit = target_of(arguments.params), plan.target.memory
    scratch = scratch_bytes(PairConfig(plan.config), plan.options, plan.dtype)
    scratch += widened_bytes(params, plan.dtype)
    own, ffn = attending(params), feeding(params)
    pools, slots = device_bytes(arguments.cache), device_bytes(arguments.slots)
    return [
        HalfPlan("attention", len(devices(own)), MemoryPlan(device_bytes(own), pools, slots, scratch, limit)),
        HalfPlan("ffn", len(devices(ffn)), MemoryPlan(device_bytes(ffn), 0, 0, scratch, limit)),
    ]


def sides_of(plan: EnginePlan, arguments: StepArguments) -> Sides:
    spec = decoder_spec(plan.config)
    numbers = sum(math.prod(own.shape) for own in paths(spec).values())
    key = jnp.dtype(plan.dtype).itemsize if plan.sizes.kv_cache_dtype == "auto" else 1
    return Sides.of(plan.config, nbytes(arguments.params) / numbers, key)


def turns(plan: EnginePlan, arguments: StepArguments) -> list[Turns]:
    """Nothing where the peaks are not known."""
    if plan.target.peaks is None:
        return []
    cluster, sides = cluster_of(plan), sides_of(plan, arguments)
    return [
        turn(cluster, sides, m, plan.sizes.max_num_seqs // m)
        for m in MICRO_BATCHES
        if plan.sizes.max_num_seqs >= m
    ]


def turn(cluster: Cluster, sides: Sides, m: int, rows: int) -> Turns:
    """The parts of one micro-batch follow each other, those of several are side by side."""
    own = cluster.turns(sides, 1, rows)
    seconds = max(sum(own), m * max(own))
    return Turns(m, rows, *own, seconds, m * rows / seconds)


def cluster_of(plan: EnginePlan) -> Cluster:
    assert plan.target.peaks is not None
    return Cluster(plan.target.peaks, len(plan.target.devices), plan.context, LIMIT)


def compared(plan: EnginePlan, arguments: StepArguments) -> dict[str, Decode | None]:
    """The most that fits either way on the plan's devices."""
    if plan.target.peaks is None:
        return {}
    cluster, sides = cluster_of(plan), sides_of(plan, arguments)
    return {"apart": cluster.apart(sides, 1), "together": cluster.together(sides)}


# ---------------------------------------------------------------- text


def render(plan: EnginePlan, arguments: StepArguments) -> list[str]:
    return [render_memory(parts(plan, arguments)), *render_turns(plan, arguments)]


def render_memory(found: list[HalfPlan]) -> str:
    heads = "weights", "cache", "slots", "temporaries", "total"
    lines = [f"{'part':<10}{'devices':>9}" + "".join(f"{name:>13}" for name in heads) + "  MiB"]
    for part in found:
        m = part.memory
        sizes = m.weights, m.cache, m.slots, m.temporaries, m.total
        lines.append(f"{part.name:<10}{part.devices:>9}" + "".join(f"{n / 2**20:>13.1f}" for n in sizes))
    return "\n".join(lines)


def render_turns(plan: EnginePlan, arguments: StepArguments) -> list[str]:
    found = turns(plan, arguments)
    if not found:
        return []
    lines = [
        f"decode with {plan.context} tokens in the cache of each row, floors from peaks in ms:",
        f"{'micro-batches':<15}{'rows':>6}{'attention':>11}{'ffn':>9}{'links':>9}{'step':>9}{'tokens/s':>11}",
    ]
    for own in found:
        cells = [own.attention, own.ffn, own.links, own.seconds]
        spans = "".join(f"{1e3 * s:>{width}.3f}" for s, width in zip(cells, (11, 9, 9, 9), strict=True))
        lines.append(f"{own.micro_batches:<15}{own.rows:>6}{spans}{own.rate:>11.0f}")
    return ["\n".join(lines), verdict(plan, arguments)]


def verdict(plan: EnginePlan, arguments: StepArguments) -> str:
    """Whether it pays, and why not."""
    sides, cluster = sides_of(plan, arguments), cluster_of(plan)
    ridge = sides.ridge(cluster.peaks)
    lines = [f"ridge: feed-forward layers compute for as long as they read all weights at {ridge:.0f} tokens"]
    found = compared(plan, arguments)
    for name, own in found.items():
        told = "does not fit" if own is None else f"{own.rows} rows, {own.rate:.0f} tokens/s of each device"
        lines.append(f"{name:<9} on {cluster.devices} devices, at most {LIMIT * 1e3:.0f} ms: {told}")
    rates = [own.rate if own else 0.0 for own in found.values()]
    lines.append("apart pays" if rates[0] > rates[1] else "apart does not pay here")
    return "\n".join(lines)


def as_json(plan: EnginePlan, arguments: StepArguments) -> dict[str, Any]:
    """The same for machines."""
    return {
        "parts": [own._asdict() | {"memory": asdict(own.memory)} for own in parts(plan, arguments)],
        "micro_batches": [own._asdict() for own in turns(plan, arguments)],
        "compared": {name: own and own._asdict() for name, own in compared(plan, arguments).items()},
    }
