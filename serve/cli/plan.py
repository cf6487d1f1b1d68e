"""`duetto plan`: the shapes, the memory and the floors of an engine, before anything is loaded or run."""

import argparse
import json
import os
from dataclasses import asdict, replace
from typing import Any

from ..host.signals import raise_on_interrupt
from ..planner import planned_halves, planned_stages
from ..planner.planning import (
    EnginePlan,
    MemoryPlan,
    TierPlan,
    abstract_arguments,
    main_shapes,
    make_rows,
    measured,
    memory_of,
    plan_job,
    planned_tiers,
)
from ..planner.roofline.presets import PRESETS
from ..planner.roofline.products import alike
from ..planner.roofline.table import ShapeCost, floored, render_fact, render_table
from ..planner.roofline.targets import find_target, here, is_gpu
from ..runtime.compiled.compile import StepArguments
from ..runtime.compiled.jaxcache import keep_compiled
from ..runtime.compiled.shapes import Shape
from .common import checked, engine_flags, engine_options, model_flags
from .plan_workload import answer, flags


def render(plan: EnginePlan, memory: MemoryPlan, rows: list[ShapeCost]) -> str:
    """The plan as text."""
    tiers = [render_tier(plan, tier) for tier in planned_tiers(plan, rows)]
    parts = [head(plan), render_memory(plan, memory), *tiers, render_rows(plan, rows)]
    return "\n\n".join([*parts, *render_facts(plan, rows)])


def head(plan: EnginePlan) -> str:
    s, n = plan.sizes, len(plan.target.devices)
    pages = " and ".join(map(str, s.pages))
    each = f" (all figures are for one of {n} devices)" if n > 1 else ""
    shards = f"{s.shards} shards, each of " if s.shards > 1 else ""
    kept = "" if s.kv_cache_dtype == "auto" else f" with a cache in {s.kv_cache_dtype}"
    flags = f"\nXLA_FLAGS={os.environ.get('XLA_FLAGS')}" if is_gpu(plan.target) else ""
    return (
        f"{plan.name} in {plan.dtype}{kept} on {plan.target.name}{each}\n"
        f"{shards}{s.max_num_seqs} requests of up to {s.max_model_len} tokens, "
        f"{pages} pages of {s.page_size} tokens{flags}"
    )


def render_memory(plan: EnginePlan, memory: MemoryPlan) -> str:
    parts = {k: v for k, v in asdict(memory).items() if k not in ("limit", "peak")} | {"total": memory.total}
    if memory.peak is not None:
        parts["measured"] = memory.peak
    lines = [f"{name:<12}{size / 2**20:>12.1f} MiB" for name, size in parts.items()]
    if memory.limit is not None:
        share = plan.options.gpu_memory_utilization
        verdict = "fits" if memory.total <= memory.limit * share else "DOES NOT FIT"
        allowed = f"{memory.limit * share / 2**20:.1f} MiB, {share:.0%} of the memory that jax takes"
        lines.append(f"{verdict} in {allowed}")
    return "\n".join(lines)


def render_tier(plan: EnginePlan, tier: TierPlan) -> str:
    """What a tier holds, and what a page from it costs beside computing it."""
    page = f"a page of {plan.options.page_size} tokens, {tier.page_bytes / 2**20:.2f} MiB"
    gain = tier.gain
    pays = "" if gain is None else f": fetching is {gain:.1f} x as fast"
    fetch, compute = (
        "-" if seconds is None else f"{seconds * 1e3:.3f} ms" for seconds in (tier.fetch, tier.compute)
    )
    return (
        f"{tier.name} holds {tier.tokens} tokens; {page}, is fetched in {fetch} at least, "
        f"computed in {compute} at least{pays}"
    )


def render_rows(plan: EnginePlan, rows: list[ShapeCost]) -> str:
    """The roofline, and what it was made from."""
    lines = render_table(rows)
    lines.append(f"each row of a decode has {plan.context} tokens in the cache, a prefill none")
    lines.append("touched: by XLA's optimised program for greedy requests, loops as often as they run")
    if len(plan.target.devices) > 1:
        lines.append("what goes over the links between devices is not in the floors")
    if peaks := plan.target.peaks:
        rates = (
            f"{peaks.flops(plan.dtype) / 1e12:.4g} TFLOP/s in {plan.dtype}, {peaks.bandwidth / 1e9:.5g} GB/s"
        )
        lines.append(f"floors from peaks: {rates}")
    return "\n".join(lines)


def render_facts(plan: EnginePlan, rows: list[ShapeCost]) -> list[str]:
    link = plan.target.peaks.link if plan.target.peaks else 0.0
    each = [f"{row.shape}, compiled:\n{render_fact(row.facts, link)}" for row in rows if row.facts]
    return [*each, *render_classes(plan, rows)]


def render_classes(plan: EnginePlan, rows: list[ShapeCost]) -> list[str]:
    """Which shapes would share a class of equal bits, as far as the products of compiled ones tell."""
    found = {str(row.shape): row.facts.products for row in rows if row.facts and row.facts.products}
    groups = alike(found, plan.config.vocab_size)
    if len(found) < 2:
        return []
    lines = [f"  {', '.join(group)}" for group in groups]
    return ["\n".join(["products configured alike, which would share a class of equal bits:", *lines])]


def as_json(plan: EnginePlan, memory: MemoryPlan, rows: list[ShapeCost]) -> str:
    """The plan for machines."""
    shown = [{**asdict(row), "shape": str(row.shape)} for row in rows]
    tiers = [asdict(tier) for tier in planned_tiers(plan, rows)]
    return json.dumps(facts_of(plan) | {"memory": asdict(memory), "tiers": tiers, "programs": shown})


def facts_of(plan: EnginePlan) -> dict[str, Any]:
    """What is planned, for machines."""
    return {
        "model": plan.name,
        "dtype": plan.dtype,
        "target": plan.target.name,
        "devices": len(plan.target.devices),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "context": plan.context,
        "sizes": asdict(plan.sizes),
    }


def staged(
    plan: EnginePlan, arguments: StepArguments, compiled: list[Shape], args: argparse.Namespace
) -> str:
    """The plan of a pipeline. Raises ValueError where it is to be measured."""
    if args.measure:
        raise ValueError("--measure is not allowed with pipeline_parallel_size: it runs one program")
    found = planned_stages.stage_plans(plan, arguments, compiled)
    if args.json:
        return json.dumps(facts_of(plan) | planned_stages.as_json(plan, arguments, found))
    return "\n\n".join([head(plan), *planned_stages.render(plan, arguments, found)])


def halved(plan: EnginePlan, arguments: StepArguments, args: argparse.Namespace) -> str:
    """The plan of attention and feed-forward layers apart. Raises ValueError where it is to be measured."""
    if args.measure:
        raise ValueError("--measure is not allowed with experimental_ffn_devices: it runs one program")
    if args.json:
        return json.dumps(facts_of(plan) | planned_halves.as_json(plan, arguments))
    return "\n\n".join([head(plan), *planned_halves.render(plan, arguments)])


# ---------------------------------------------------------------- the command


def add_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
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
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the compiled programs on this machine: its peaks, their times and memory",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    flags.add_flags(parser)
    engine_flags(parser, alone=True)


def run(args: argparse.Namespace) -> int:
    """Prints a plan. Raises ValueError for what cannot be planned."""
    raise_on_interrupt()
    options = engine_options(args)
    if args.shape and args.model:
        raise ValueError(f"--model {args.model} is not allowed with --shape {args.shape}: one of them")
    if args.workload is not None:
        return answer.run(args, options)
    checked(args, lambda: flags.refuse_flags(args))
    if args.target and args.measure:
        raise ValueError("--measure is for this machine: it cannot go with --target")
    if not args.target:
        keep_compiled(None if args.compilation_cache == "none" else args.compilation_cache)
    target = find_target(args.target) if args.target else here()
    where = {"revision": args.revision, "download_dir": args.download_dir}
    plan = plan_job(args.model, args.shape, args.dtype, options, target, args.context, **where)
    arguments = abstract_arguments(plan)
    choices = {"main": main_shapes(plan.shapes), "all": plan.shapes, "none": []}
    if options.pipeline_parallel_size > 1:
        print(staged(plan, arguments, choices[args.compile], args))
        return 0
    if options.experimental_ffn_devices:
        print(halved(plan, arguments, args))
        return 0
    rows = make_rows(plan, arguments, choices[args.compile])
    memory = memory_of(plan, arguments, rows)
    if args.measure:
        memory, rows = measured(plan, arguments, memory, rows)
        # last: its arrays must not count as the plan's memory
        plan = replace(plan, target=here(measure=True))
        rows = [floored(row, plan.target, plan.dtype) for row in rows]
    print(as_json(plan, memory, rows) if args.json else render(plan, memory, rows))
    return 0
