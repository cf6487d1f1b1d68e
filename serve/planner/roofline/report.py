"""The report at the end of a run, as text, and as a JSON file of the same numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATENCY_KEYS = {"TTFT": "ttft", "TPOT": "tpot", "end to end": "e2e"}


def format_seconds(seconds: float) -> str:
    """Show seconds as ms or s."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def render_latencies(report: Mapping[str, Any]) -> list[str]:
    """Show a row for each latency that was measured, under a header."""
    rows = [
        f"{title:>12}" + "".join(f"{format_seconds(report[key][p]):>11}" for p in ("p50", "p90", "p99"))
        for title, key in LATENCY_KEYS.items()
        if report[key]
    ]
    return [" " * 12 + "".join(f"{p:>11}" for p in ("p50", "p90", "p99")), *rows] if rows else []


def render_compilations(report: Mapping[str, Any]) -> str:
    """Summarise the step programs that were read and compiled, before the engine served and while it
    served."""
    first, read, missing = report["warmup_seconds"], report["programs_read"], report["programs_missing"]
    late = [t for t in report["compiled_at"].values() if t > first]
    overlap = f"{report['steps_beside_compiling_seconds']:.1f} s of steps"
    num_compiled = max(0, len(report["compiled_at"]) - len(late) - read)
    at_start = " and ".join(
        [f"{num_compiled} compiled"] * (num_compiled > 0 or not read) + [f"{read} read"] * (read > 0)
    )
    parts = [
        f"{at_start} in {first:.1f} s",
        *([f"{len(late)} more beside {overlap} until {max(late):.1f} s"] if late else []),
        *([f"{missing} not needed so far"] if missing else []),
        f"{report['compilations']} while requests waited",
    ]
    return ", ".join(parts)


def render_tier_report(tier_report: Mapping[str, Any]) -> list[str]:
    """Summarise KV offload: pages in each tier, and seconds of fetching and of computing a page."""
    if not tier_report:
        return []
    fetch, compute = tier_report["page_fetch_seconds"], tier_report["page_compute_seconds"]
    why = (
        ""
        if None in (fetch, compute)
        else f": {format_seconds(fetch)} a page, computing it {format_seconds(compute)}"
    )
    places = [
        f"{name} {tier['pages']} ({tier['bytes'] / 2**20:.0f} MiB, {tier['hits']} hits)"
        for name, tier in tier_report.items()
        if isinstance(tier, dict)
    ]
    return [f"tiers        pages: {', '.join(places)}; {tier_report['fetched']} fetched{why}"]


def render_engine_report(report: Mapping[str, Any]) -> str:
    """Show an engine's report (`LLM.report`) as lines of text."""
    r = report
    work = (
        f"{r['requests']} requests, {r['prompt_tokens']} prompt and {r['generated_tokens']} generated tokens"
    )
    rates = (
        f"prefill {r['prefill_tokens_per_second']:.0f}, decode {r['decode_tokens_per_second']:.0f} tokens/s"
    )
    padding = f"prefill {r['padding_prefill']:.1%}, decode {r['padding_decode']:.1%} of what was computed"
    cache = f"peak {r['peak_cache_occupancy']:.1%} of {r['cache_pages']} pages of {r['page_size']} tokens"
    reuse = f"prefix hits {r['prefix_hit_rate']:.1%} of prompt tokens, {r['preemptions']} preemptions"
    lines = [
        f"{work} in {r['seconds']:.2f} s of steps",
        *render_latencies(report),
        f"throughput   {rates}",
        f"padding      {padding}",
        f"cache        {cache}, {reuse}",
        f"programs     {render_compilations(r)}",
        f"dtype        {r['dtype']}",
    ]
    lines += render_tier_report(r.get("tiers", {}))
    gathered = r["gathering"]
    if gathered["groups"]:
        lines.append(
            f"gathering    {gathered['prompts']} prompts in {gathered['groups']} groups, "
            f"for which seats were kept free {format_seconds(gathered['seconds'])} "
            f"in {gathered['steps']} steps"
        )
    if guesses := r.get("speculation"):
        share = guesses["accepted"] / max(guesses["drafted"], 1)
        lines.append(
            f"guesses      {guesses['accepted']} of {guesses['drafted']} accepted ({share:.1%}), "
            f"{guesses['tokens_per_pass']:.2f} tokens a pass of a row"
        )
    shapes = [
        f"{name} {r['steps'][name]} x {format_seconds(took)}" for name, took in r["step_seconds"].items()
    ]
    if shapes:
        lines.append(
            f"steps        {', '.join(shapes)} (medians, from dispatch or the last results to its own)"
        )
    if any(r["host_seconds"].values()):
        host_parts = [f"{name} {format_seconds(took)}" for name, took in r["host_seconds"].items() if took]
        lines.append(f"host         {', '.join(host_parts)} of the steps")
    if "explained" in r:
        lines += ["", r["explained"]]
    return "\n".join(lines)


def save_report(report: Mapping[str, Any], path: str | Path) -> None:
    """Write a report as JSON. Raises OSError."""
    Path(path).write_text(json.dumps(report, indent=2) + "\n")


def check_report_path(path: str | Path) -> None:
    """Check that a report can be written to a path. Raises ValueError if it cannot, or if the file holds
    something else."""
    report_file = Path(path)
    if not report_file.parent.is_dir():
        raise ValueError(f"--report {path}: the folder {report_file.parent} does not exist")
    if report_file.is_dir() or (report_file.is_file() and not is_report(report_file)):
        raise ValueError(f"--report {path}: it exists and is no report; give another name")


def is_report(file: Path) -> bool:
    """Tell if a file is empty or a report that an earlier run has saved."""
    try:
        content = file.read_bytes()
        record = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return False
    return not content or (
        isinstance(record, dict) and {*LATENCY_KEYS.values(), "steps", "requests"} <= {*record}
    )
