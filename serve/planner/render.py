"""A plan as text, and as JSON for machines."""

import json
import os
from dataclasses import asdict
from typing import Any

from ..runtime.compiled.compile import StepArguments
from .planning import EnginePlan
from .roofline.products import alike
from .roofline.table import or_dash, render_fact, render_table
from .roofline.targets import options_of
from .stage_plans import (
    LIMIT,
    StagePlan,
    TierPlan,
    cluster_of,
    compared,
    micro_batches,
    planned_tiers,
    sides_of,
)

PARTS = "weights", "cache", "slots", "temporaries", "total"  # of a device's memory


def render(plan: EnginePlan, arguments: StepArguments, found: list[StagePlan]) -> str:
    tiers = [render_tier(plan, tier) for tier in planned_tiers(plan, found[0].rows)]
    facts = [text for stage in found for text in render_facts(plan, stage)]
    parts = [head(plan), render_memory(plan, found), *tiers, *render_rows(plan, found), *facts]
    return "\n\n".join([*parts, *render_micro(plan, arguments, found), *render_compared(plan, arguments)])


def head(plan: EnginePlan) -> str:
    s, n = plan.sizes, len(plan.target.devices)
    pages = " and ".join(map(str, s.pages))
    each = f" (all figures are for one of {n} devices)" if n > 1 else ""
    shards = f"{s.shards} shards, each of " if s.shards > 1 else ""
    kept = "" if s.kv_cache_dtype == "auto" else f" with a cache in {s.kv_cache_dtype}"
    named = "; ".join(filter(None, (plan.cpu_kernels, plan.without_kernels)))
    kernels = f"\nproducts by CPU kernels ({named})" if plan.cpu_kernels else ""
    kernels = f"\nwithout CPU kernels: {named}" if named and not kernels else kernels
    options = "".join(f"\n{name}={value}" for name, value in options_of(plan.target).items())
    return (
        f"{plan.name} in {plan.dtype}{kept} on {plan.target.name}{each}\n"
        f"{shards}{s.max_num_seqs} requests of up to {s.max_model_len} tokens, "
        f"{pages} pages of {s.page_size} tokens{options}{kernels}"
    )


def render_memory(plan: EnginePlan, found: list[StagePlan]) -> str:
    """A column for each stage."""
    memories = [stage.memory for stage in found]
    parts = {name: [getattr(memory, name) for memory in memories] for name in PARTS}
    if peaks := [memory.peak for memory in memories if memory.peak is not None]:
        parts["measured"] = peaks
    lines = []
    if len(found) > 1:
        lines.append(f"{'stage':<12}" + "".join(f"{stage.name:>12}" for stage in found))
        lines.append(f"{'devices':<12}" + "".join(f"{stage.devices:>12}" for stage in found))
    for name, sizes in parts.items():
        lines.append(f"{name:<12}" + "".join(f"{size / 2**20:>12.1f}" for size in sizes) + " MiB")
    if plan.target.memory is not None:
        share = plan.options.gpu_memory_utilization
        fits = all(memory.total <= plan.target.memory * share for memory in memories)
        allowed = f"{plan.target.memory * share / 2**20:.1f} MiB, {share:.0%} of the memory that jax takes"
        lines.append(f"{'fits' if fits else 'DOES NOT FIT'} in {allowed}")
    return "\n".join(lines)


def render_tier(plan: EnginePlan, tier: TierPlan) -> str:
    """Show a tier's size, and the seconds of a page that is fetched and of one that is computed."""
    page = f"a page of {plan.options.page_size} tokens, {tier.page_bytes / 2**20:.2f} MiB"
    pays = "" if tier.gain is None else f": fetching is {tier.gain:.1f} x as fast"
    fetch, compute = (
        "-" if seconds is None else f"{seconds * 1e3:.3f} ms" for seconds in (tier.fetch, tier.compute)
    )
    return (
        f"{tier.name} holds {tier.tokens} tokens; {page}, is fetched in {fetch} at least, "
        f"computed in {compute} at least{pays}"
    )


def render_rows(plan: EnginePlan, found: list[StagePlan]) -> list[str]:
    """The roofline of each stage, and what it was made from."""
    titles = {stage.name: [f"stage {stage.name}"] if len(found) > 1 else [] for stage in found}
    tables = [[*titles[stage.name], *render_table(stage.rows)] for stage in found if stage.rows]
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
    """Show what XLA made of a stage's programs, and which of them would share a class of equal bits, as far
    as their products tell."""
    link = plan.target.peaks.link if plan.target.peaks else 0.0
    each = [f"{row.shape}, compiled:\n{render_fact(row.facts, link)}" for row in stage.rows if row.facts]
    products = {str(row.shape): row.facts.products for row in stage.rows if row.facts and row.facts.products}
    if len(products) < 2:
        return each
    lines = [f"  {', '.join(group)}" for group in alike(products, plan.config.vocab_size)]
    return [*each, "\n".join(["products configured alike, which would share a class of equal bits:", *lines])]


def render_micro(plan: EnginePlan, arguments: StepArguments, found: list[StagePlan]) -> list[str]:
    """Decode in micro-batches: milliseconds of each stage and of a token, and tokens a second."""
    rows = micro_batches(plan, arguments)
    if not rows:
        return []
    seats, names = plan.sizes.max_num_seqs, [*(stage.name for stage in found), "links"]
    lines = [f"decode of {seats} rows with {plan.context} tokens in the cache, in ms, from the floors:"]
    columns = "".join(f"{name:>10}" for name in names)
    lines.append(
        f"{'micro-batches':<15}{'rows':>6}{columns}{'bubbles':>9}{'drained':>9}{'a token':>9}{'tokens/s':>11}"
    )
    for m in rows:
        spans = "".join(f"{1e3 * seconds:>10.3f}" for seconds in (*m.stages, m.links))
        shares = f"{m.bubbles:>9.0%}{or_dash(m.drained, '.0%'):>9}"
        lines.append(f"{m.micro_batches:<15}{m.rows:>6}{spans}{shares}{m.seconds * 1e3:>9.3f}{m.rate:>11.0f}")
    return ["\n".join(lines)]


def render_compared(plan: EnginePlan, arguments: StepArguments) -> list[str]:
    """Compare feed-forward layers apart with one layout of as many devices."""
    found = compared(plan, arguments)
    if not found:
        return []
    cluster = cluster_of(plan)
    ridge = sides_of(plan, arguments).ridge(cluster.peaks)
    lines = [f"ridge: feed-forward layers compute for as long as they read all weights at {ridge:.0f} tokens"]
    for name, own in found.items():
        most = "does not fit" if own is None else f"{own.rows} rows, {own.rate:.0f} tokens/s of each device"
        lines.append(f"{name:<9} on {cluster.devices} devices, at most {LIMIT * 1e3:.0f} ms: {most}")
    rates = [own.rate if own else 0.0 for own in found.values()]
    lines.append("apart pays" if rates[0] > rates[1] else "apart does not pay here")
    return ["\n".join(lines)]


def as_json(plan: EnginePlan, arguments: StepArguments, found: list[StagePlan]) -> str:
    """The plan for machines. A single stage's memory and programs are the plan's own."""
    facts: dict[str, Any] = {
        "model": plan.name,
        "dtype": plan.dtype,
        "target": plan.target.name,
        "devices": len(plan.target.devices),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "xla_options": options_of(plan.target),
        "cpu_kernels": plan.cpu_kernels,
        "without_cpu_kernels": plan.without_kernels or None,
        "context": plan.context,
        "sizes": asdict(plan.sizes),
        "tiers": [asdict(tier) for tier in planned_tiers(plan, found[0].rows)],
    }
    stages = [stage_facts(stage) for stage in found]
    if len(stages) == 1:
        return json.dumps(facts | {name: stages[0][name] for name in ("memory", "programs")})
    micro = [m._asdict() for m in micro_batches(plan, arguments)]
    both = {name: own and own._asdict() for name, own in compared(plan, arguments).items()}
    return json.dumps(facts | {"stages": stages, "micro_batches": micro, "compared": both})


def stage_facts(stage: StagePlan) -> dict[str, Any]:
    return {
        "name": stage.name,
        "layers": [stage.layers.start, stage.layers.stop - 1],
        "devices": stage.devices,
        "memory": asdict(stage.memory),
        "programs": [{**asdict(row), "shape": str(row.shape)} for row in stage.rows],
    }
