"""A plan as text, and as JSON for machines."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..runtime.compiled.lowering import StepArguments, xla_options
from .engine_plan import EnginePlan
from .roofline.cost_table import format_or_dash, render_cost_table, render_program_facts
from .roofline.products import group_by_products
from .stage_plans import (
    MAX_TOKEN_SECONDS,
    StagePlan,
    TierPlan,
    cluster_from_plan,
    compare_ffn_layouts,
    model_halves,
    plan_micro_batches,
    plan_tiers,
)

MEMORY_PARTS = "weights", "cache", "slots", "temporaries", "total"  # parts of a device's memory


def render_plan(plan: EnginePlan, arguments: StepArguments, stage_plans: list[StagePlan]) -> str:
    """Show a plan as text."""
    tiers = [render_tier(plan, tier) for tier in plan_tiers(plan, stage_plans[0].rows)]
    facts = [text for stage in stage_plans for text in render_facts(plan, stage)]
    parts = [
        render_heading(plan, xla_options(arguments) or {}),
        render_memory(plan, stage_plans),
        *tiers,
        *render_rooflines(plan, stage_plans),
        *facts,
    ]
    return "\n\n".join(
        [*parts, *render_micro_batches(plan, arguments, stage_plans), *render_ffn_comparison(plan, arguments)]
    )


def render_heading(plan: EnginePlan, compiler_flags: Mapping[str, str]) -> str:
    """Show the model, the target, the sizes and XLA's options of a plan."""
    s, n = plan.sizes, len(plan.target.devices)
    pages = " and ".join(map(str, s.pages))
    device_note = f" (all figures are for one of {n} devices)" if n > 1 else ""
    shards = f"{s.shards} shards, each of " if s.shards > 1 else ""
    cache_note = "" if s.kv_cache_dtype == "auto" else f" with a cache in {s.kv_cache_dtype}"
    kernel_names = "; ".join(filter(None, (plan.cpu_kernel_isa, plan.no_cpu_kernels_reason)))
    kernels = f"\nproducts by CPU kernels ({kernel_names})" if plan.cpu_kernel_isa else ""
    kernels = f"\nwithout CPU kernels: {kernel_names}" if kernel_names and not kernels else kernels
    options = "".join(f"\n{name}={value}" for name, value in compiler_flags.items())
    return (
        f"{plan.name} in {plan.dtype}{cache_note} on {plan.target.name}{device_note}\n"
        f"{shards}{s.max_num_seqs} requests of up to {s.max_model_len} tokens, "
        f"{pages} pages of {s.page_size} tokens{options}{kernels}"
    )


def render_memory(plan: EnginePlan, stage_plans: list[StagePlan]) -> str:
    """Show the memory of each stage in a column, in MiB."""
    memories = [stage.memory for stage in stage_plans]
    parts = {name: [getattr(memory, name) for memory in memories] for name in MEMORY_PARTS}
    if peaks := [memory.peak for memory in memories if memory.peak is not None]:
        parts["measured"] = peaks
    lines = []
    if len(stage_plans) > 1:
        lines.append(f"{'stage':<12}" + "".join(f"{stage.name:>12}" for stage in stage_plans))
        lines.append(f"{'devices':<12}" + "".join(f"{stage.devices:>12}" for stage in stage_plans))
    for name, sizes in parts.items():
        lines.append(f"{name:<12}" + "".join(f"{size / 2**20:>12.1f}" for size in sizes) + " MiB")
    if plan.target.memory is not None:
        share = plan.options.gpu_memory_utilization
        fits = all(memory.total <= plan.target.memory * share for memory in memories)
        allowed = f"{plan.target.memory * share / 2**20:.1f} MiB, {share:.0%} of the memory that jax takes"
        lines.append(f"{'fits' if fits else 'DOES NOT FIT'} in {allowed}")
    return "\n".join(lines)


def render_tier(plan: EnginePlan, tier: TierPlan) -> str:
    """Show a tier's size, and the seconds to fetch a page and to compute it."""
    page = f"a page of {plan.options.page_size} tokens, {tier.page_bytes / 2**20:.2f} MiB"
    pays = "" if tier.fetch_speedup is None else f": fetching is {tier.fetch_speedup:.1f} x as fast"
    fetch, compute = (
        "-" if seconds is None else f"{seconds * 1e3:.3f} ms" for seconds in (tier.fetch, tier.compute)
    )
    return (
        f"{tier.name} holds {tier.tokens} tokens; {page}, is fetched in {fetch} at least, "
        f"computed in {compute} at least{pays}"
    )


def render_rooflines(plan: EnginePlan, stage_plans: list[StagePlan]) -> list[str]:
    """Show the roofline of each stage, and the peaks that its floors follow from."""
    titles = {stage.name: [f"stage {stage.name}"] if len(stage_plans) > 1 else [] for stage in stage_plans}
    tables = [[*titles[stage.name], *render_cost_table(stage.rows)] for stage in stage_plans if stage.rows]
    if not tables:
        return []
    tables[-1].append(f"each row of a decode has {plan.context} tokens in the cache, a prefill none")
    tables[-1].append("touched: by XLA's optimised program for greedy requests, loops as often as they run")
    if len(plan.target.devices) > 1:
        tables[-1].append("what goes over the links between devices is not in the floors")
    if peaks := plan.target.peaks:
        rates = f"{peaks.flops(plan.dtype) / 1e12:.4g} TFLOP/s in {plan.dtype}, {peaks.bandwidth / 1e9:.5g}"
        tables[-1].append(f"floors from peaks: {rates} GB/s")
    return ["\n".join(lines) for lines in tables]


def render_facts(plan: EnginePlan, stage: StagePlan) -> list[str]:
    """Show the facts of a stage's compiled programs. Group programs whose products are configured alike:
    these would share a class of equal bits."""
    link = plan.target.peaks.link if plan.target.peaks else 0.0
    texts = [
        f"{row.shape}, compiled:\n{render_program_facts(row.facts, link)}" for row in stage.rows if row.facts
    ]
    products = {str(row.shape): row.facts.products for row in stage.rows if row.facts and row.facts.products}
    if len(products) < 2:
        return texts
    lines = [f"  {', '.join(group)}" for group in group_by_products(products, plan.config.vocab_size)]
    return [
        *texts,
        "\n".join(["products configured alike, which would share a class of equal bits:", *lines]),
    ]


def render_micro_batches(
    plan: EnginePlan, arguments: StepArguments, stage_plans: list[StagePlan]
) -> list[str]:
    """Show decode in micro-batches: milliseconds of each stage and of a token, and tokens a second."""
    rows = plan_micro_batches(plan, arguments)
    if not rows:
        return []
    num_slots, names = plan.sizes.max_num_seqs, [*(stage.name for stage in stage_plans), "links"]
    lines = [f"decode of {num_slots} rows with {plan.context} tokens in the cache, in ms, from the floors:"]
    columns = "".join(f"{name:>10}" for name in names)
    lines.append(
        f"{'micro-batches':<15}{'rows':>6}{columns}{'bubbles':>9}{'drained':>9}{'a token':>9}{'tokens/s':>11}"
    )
    for m in rows:
        spans = "".join(f"{1e3 * seconds:>10.3f}" for seconds in (*m.stages, m.links))
        shares = f"{m.bubbles:>9.0%}{format_or_dash(m.drained, '.0%'):>9}"
        lines.append(f"{m.micro_batches:<15}{m.rows:>6}{spans}{shares}{m.seconds * 1e3:>9.3f}{m.rate:>11.0f}")
    return ["\n".join(lines)]


def render_ffn_comparison(plan: EnginePlan, arguments: StepArguments) -> list[str]:
    """Compare feed-forward layers on devices of their own with one layout of as many devices."""
    decodes = compare_ffn_layouts(plan, arguments)
    if not decodes:
        return []
    cluster = cluster_from_plan(plan)
    ridge = model_halves(plan, arguments).ridge_point(cluster.peaks)
    lines = [f"ridge: feed-forward layers compute for as long as they read all weights at {ridge:.0f} tokens"]
    for name, decode in decodes.items():
        text = (
            "does not fit"
            if decode is None
            else f"{decode.rows} rows, {decode.rate:.0f} tokens/s of each device"
        )
        lines.append(
            f"{name:<9} on {cluster.devices} devices, at most {MAX_TOKEN_SECONDS * 1e3:.0f} ms: {text}"
        )
    rates = [decode.rate if decode else 0.0 for decode in decodes.values()]
    lines.append("apart pays" if rates[0] > rates[1] else "apart does not pay here")
    return ["\n".join(lines)]


def encode_plan(plan: EnginePlan, arguments: StepArguments, stage_plans: list[StagePlan]) -> str:
    """Encode a plan as JSON. The memory and programs of a single stage are keys of the plan."""
    facts: dict[str, Any] = {
        "model": plan.name,
        "dtype": plan.dtype,
        "target": plan.target.name,
        "devices": len(plan.target.devices),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "xla_options": xla_options(arguments) or {},
        "cpu_kernels": plan.cpu_kernel_isa,
        "without_cpu_kernels": plan.no_cpu_kernels_reason or None,
        "context": plan.context,
        "sizes": asdict(plan.sizes),
        "tiers": [asdict(tier) for tier in plan_tiers(plan, stage_plans[0].rows)],
    }
    stages = [stage_record(stage) for stage in stage_plans]
    if len(stages) == 1:
        return json.dumps(facts | {name: stages[0][name] for name in ("memory", "programs")})
    micro = [m._asdict() for m in plan_micro_batches(plan, arguments)]
    comparison = {
        name: decode and decode._asdict() for name, decode in compare_ffn_layouts(plan, arguments).items()
    }
    return json.dumps(facts | {"stages": stages, "micro_batches": micro, "compared": comparison})


def stage_record(stage: StagePlan) -> dict[str, Any]:
    """Return a stage as plain values for JSON."""
    return {
        "name": stage.name,
        "layers": [stage.layers.start, stage.layers.stop - 1],
        "devices": stage.devices,
        "memory": asdict(stage.memory),
        "programs": [{**asdict(row), "shape": str(row.shape)} for row in stage.rows],
    }
