"""`duetto plan`: the shapes, the memory and the floors of an engine, before anything is loaded or run."""

import argparse
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from ..checkpoints.huggingface import read_config
from ..model.compress import form_spec
from ..model.config import ModelConfig
from ..model.sharding import device_bytes, fitted, shardings
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import abstract, is_spec
from .facts import Facts, facts
from .loading import DEMO, compute_dtype, keep_compiled, read_shapes
from .options import EngineOptions
from .presets import PRESETS
from .programs import Arguments, Shape, Sizes, arguments_like, lower
from .roofline import Work, work
from .shapes import table
from .sizing import choose_sizes, scratch_bytes, widened_bytes
from .targets import Target, find_target, here


@dataclass(frozen=True)
class Job:
    """What is planned: a model's sizes, an engine's options and shapes, the devices, and tokens in the cache of each row."""

    name: str
    config: ModelConfig
    dtype: str
    options: EngineOptions
    target: Target
    sizes: Sizes
    context: int
    params: Decoder | None = (
        None  # without numbers; by default those of the sizes in the option's quantization
    )

    @property
    def shapes(self) -> list[Shape]:
        o, chunk = self.options, min(self.options.max_prefill_tokens, self.sizes.max_model_len)
        return table(self.sizes.max_num_seqs, chunk, o.decode_steps, o.reproducible, o.guesses, o.nodes)


@dataclass(frozen=True)
class Memory:
    """Bytes on each device: what an engine holds, and temporaries of its largest program (compiled, or else estimated)."""

    weights: int
    cache: int
    slots: int
    temporaries: int
    limit: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.slots + self.temporaries


@dataclass(frozen=True)
class Row:
    """A shape's work on each device, its floor in seconds where the peaks are known, and what XLA made of it."""

    shape: Shape
    work: Work
    floor: float | None
    bound: str | None
    facts: Facts | None


# ---------------------------------------------------------------- planning


def plan_job(
    model: str | None,
    shape: str | None,
    dtype: str,
    options: EngineOptions,
    target: Target,
    context: int | None,
) -> Job:
    """Chooses an engine's sizes as a start would. Raises ValueError where they do not fit, or the target cannot hold them."""
    config = PRESETS[shape] if shape else read_config(DEMO if model is None else Path(model))
    chosen = compute_dtype(dtype, target.devices[0])
    chosen = "bfloat16" if chosen == "auto" else str(jnp.dtype(chosen))
    if shape:
        weights = abstract(form_spec(config, options.quantization), jnp.dtype(chosen))
    else:
        weights = read_shapes(DEMO if model is None else Path(model), chosen, options.quantization)
    params = abstract_params(config, chosen, target, weights)
    sizes = choose_sizes(config, options, params, target.memory)
    config = config.within(sizes.max_model_len)
    context = min(1024, sizes.max_model_len) if context is None else context
    if not 0 < context <= sizes.max_model_len:
        raise ValueError(f"context {context} is not allowed: 1 to max_model_len {sizes.max_model_len}")
    return Job(shape or model or "the demo model", config, chosen, options, target, sizes, context, params)


def abstract_arguments(job: Job) -> Arguments:
    """Parameters, cache and slots without numbers, placed on the target: split by RULES where it has several devices."""
    weights = abstract(form_spec(job.config, job.options.quantization), jnp.dtype(job.dtype))
    params = abstract_params(job.config, job.dtype, job.target, job.params or weights)
    return arguments_like(job.config, params, job.sizes)


def abstract_params(
    config: ModelConfig, dtype: Any, target: Target, weights: Decoder | None = None
) -> Decoder:
    """Parameters without numbers on a target's devices, by default arrays; a record's arrays lie as the parameter would."""
    specs, one = decoder_spec(config), SingleDeviceSharding(target.devices[0])
    where: Any = jax.tree.map(lambda _: one, specs, is_leaf=is_spec)
    if len(target.devices) > 1:
        where = shardings(specs, Mesh(np.array(target.devices), ("tensor",)))

    def placed(own: Any, weight: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitted(own, x.shape)), weight
        )

    return jax.tree.map(placed, where, abstract(specs, jnp.dtype(dtype)) if weights is None else weights)


def compile_for(job: Job, shape: Shape, arguments: Arguments) -> jax.stages.Compiled:
    """One program, ahead of time, for the job's target."""
    with warnings.catch_warnings():
        # jax stores what it compiled for an absent device, and cannot read it back.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        return lower(shape, job.config, arguments, job.sizes).compile()


def make_rows(job: Job, arguments: Arguments, compiled: Iterable[Shape]) -> list[Row]:
    """A row for each shape of the table; those of `compiled` with what XLA made of them."""
    chosen, peaks, n = set(compiled), job.target.peaks, len(job.target.devices)
    rows = []
    for shape in job.shapes:
        whole = work(shape, job.config, job.dtype, job.context, arguments.params)
        share = Work(whole.flops / n, whole.bytes / n)
        at_most = (peaks.flops(job.dtype), peaks.bandwidth) if peaks else None
        found = facts(compile_for(job, shape, arguments)) if shape in chosen else None
        rows.append(
            Row(
                shape,
                share,
                share.floor(*at_most) if at_most else None,
                share.bound(*at_most) if at_most else None,
                found,
            )
        )
    return rows


def main_shapes(shapes: list[Shape]) -> list[Shape]:
    """The largest prefill and the widest single step of decode."""
    prefill = max((s for s in shapes if s.phase == "prefill"), key=lambda s: s.rows * s.tokens)
    return [prefill, max((s for s in shapes if s.phase == "decode" and s.tokens == 1), key=lambda s: s.rows)]


def memory_of(job: Job, arguments: Arguments, rows: list[Row]) -> Memory:
    found = [row.facts.temporaries for row in rows if row.facts]
    estimate = scratch_bytes(job.config, job.options, job.dtype) + widened_bytes(arguments.params)
    return Memory(
        weights=device_bytes(arguments.params),
        cache=device_bytes(arguments.cache),
        slots=device_bytes(arguments.slots),
        temporaries=max(found) if found else estimate,
        limit=job.target.memory,
    )


# ---------------------------------------------------------------- showing


def render(job: Job, memory: Memory, rows: list[Row]) -> str:
    """The plan as text."""
    return "\n\n".join([head(job), render_memory(job, memory), render_rows(job, rows), *render_facts(rows)])


def head(job: Job) -> str:
    s, n = job.sizes, len(job.target.devices)
    pages = " and ".join(map(str, s.pages))
    each = f" (all figures are for one of {n} devices)" if n > 1 else ""
    return (
        f"{job.name} in {job.dtype} on {job.target.name}{each}\n"
        f"{s.max_num_seqs} requests of up to {s.max_model_len} tokens, {pages} pages of {s.page_size} tokens"
    )


def render_memory(job: Job, memory: Memory) -> str:
    parts = {k: v for k, v in asdict(memory).items() if k != "limit"} | {"total": memory.total}
    lines = [f"{name:<12}{size / 2**20:>12.1f} MiB" for name, size in parts.items()]
    if memory.limit is not None:
        allowed = memory.limit * job.options.gpu_memory_utilization
        verdict = "fits" if memory.total <= allowed else "DOES NOT FIT"
        lines.append(
            f"{verdict} in {allowed / 2**20:.1f} MiB, {job.options.gpu_memory_utilization:.0%} of the device's memory"
        )
    return "\n".join(lines)


def render_rows(job: Job, rows: list[Row]) -> str:
    """The roofline. Operations and bytes are counted analytically; temporaries are XLA's."""
    peaks = job.target.peaks
    lines = [
        f"{'program':<18}{'GFLOP':>10}{'MB':>10}{'FLOP/B':>9}{'floor ms':>10}  {'bound':<8}{'temporaries MiB':>15}"
    ]
    for row in rows:
        w, f = row.work, row.facts
        floor = "-" if row.floor is None else f"{row.floor * 1e3:.3f}"
        scratch = "-" if f is None else f"{f.temporaries / 2**20:.1f}"
        numbers = f"{w.flops / 1e9:>10.2f}{w.bytes / 1e6:>10.1f}{w.intensity:>9.1f}{floor:>10}"
        lines.append(f"{row.shape!s:<18}{numbers}  {row.bound or '-':<8}{scratch:>15}")
    lines.append(
        f"counted analytically: each row of a decode has {job.context} tokens in the cache, a prefill none"
    )
    if len(job.target.devices) > 1:
        lines.append("what goes over the links between devices is not in the floors")
    if peaks:
        rates = (
            f"{peaks.flops(job.dtype) / 1e12:.4g} TFLOP/s in {job.dtype}, {peaks.bandwidth / 1e9:.5g} GB/s"
        )
        lines.append(f"floors from peaks: {rates}")
    return "\n".join(lines)


def render_facts(rows: list[Row]) -> list[str]:
    return [f"{row.shape}, compiled:\n{render_fact(row.facts)}" for row in rows if row.facts]


def render_fact(f: Facts) -> str:
    lines = [f"  updated in place {f.aliased / 2**20:.1f} MiB in {f.aliased_leaves} buffers"]
    lines += [
        f"  {m.times} x {m.instruction} writes {m.buffer}, {m.bytes / 2**20:.1f} MiB" for m in f.moved[:8]
    ]
    lines += [f"  {n} x {kind}, {size / 2**20:.2f} MiB in all" for kind, (n, size) in f.collectives.items()]
    return "\n".join(lines)


def as_json(job: Job, memory: Memory, rows: list[Row]) -> str:
    """The plan for machines."""
    shown = [{**asdict(row), "shape": str(row.shape)} for row in rows]
    top = {
        "model": job.name,
        "dtype": job.dtype,
        "target": job.target.name,
        "devices": len(job.target.devices),
    }
    return json.dumps(
        {
            **top,
            "context": job.context,
            "sizes": asdict(job.sizes),
            "memory": asdict(memory),
            "programs": shown,
        }
    )


# ---------------------------------------------------------------- the command


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=sorted(PRESETS), help="a well-known model's sizes instead of --model"
    )
    parser.add_argument(
        "--target", help="h100, h200, 8xh200, v5e:2x2, v6e:2x4, ...: an accelerator that need not be here"
    )
    parser.add_argument(
        "--context", type=int, help="tokens in the cache of each row (default: 1024 or max-model-len)"
    )
    parser.add_argument(
        "--compile", choices=("main", "all", "none"), default="main",
        help="which programs to compile: the largest prefill and the widest decode (default), all, or none",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="measure this machine's peaks, for the floors")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run_plan(args: argparse.Namespace, options: EngineOptions) -> int:
    """Prints a plan. Raises ValueError for what cannot be planned."""
    if args.target and args.measure:
        raise ValueError("--measure is for this machine: it cannot go with --target")
    if not args.target:
        keep_compiled(None if args.compilation_cache == "none" else args.compilation_cache)
    target = find_target(args.target) if args.target else here(args.measure)
    job = plan_job(args.model, args.shape, args.dtype, options, target, args.context)
    arguments, choices = (
        abstract_arguments(job),
        {"main": main_shapes(job.shapes), "all": job.shapes, "none": []},
    )
    rows = make_rows(job, arguments, choices[args.compile])
    memory = memory_of(job, arguments, rows)
    print(as_json(job, memory, rows) if args.json else render(job, memory, rows))
    return 0
