"""The search for an engine, and its answer as plain numbers, as text and as a picture."""

import argparse
import json
import math
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from ...host.signals import defer_interrupt
from ...options.engine import EngineOptions
from ...options.flags import read_given_fields
from ...planner.simulation.candidates import SearchSpace, flag_words
from ...planner.simulation.memory_fit import PlannedModel
from ...planner.simulation.search import (
    MAX_LOADS,
    CandidateResult,
    LoadPoint,
    SearchGoal,
    search_candidates,
    simulate_without_each_limit,
    size_fleet,
)
from ...planner.workloads.workload import Workload
from ..common import exit_on_usage_error
from .flags import read_efficiency, read_goal, read_model_and_options, read_workload

MAX_SHOWN = 3  # candidates that are printed
LIMIT_NAMES = {"ttft": "first token", "tpot": "time between tokens"}
MODEL_FLAGS = "dtype", "revision", "tokenizer", "tokenizer_revision", "download_dir"  # flags of the model


def print_workload_plan(args: argparse.Namespace, options: EngineOptions) -> int:
    """Search and print the answer. Ctrl-C ends the search, and the answer has what it found by then. Raises
    ValueError for a workload that cannot be planned."""
    goal, efficiency = exit_on_usage_error(args, lambda: (read_goal(args, options), read_efficiency(args)))
    fixed_options = frozenset(read_given_fields(EngineOptions, args))
    full_workload = read_workload(args)
    model, options = read_model_and_options(args, options, full_workload)
    workload = full_workload.with_max_tokens(options.max_model_len or full_workload.longest)
    if not workload.entries:
        raise ValueError(f"every request of --workload is longer than max_model_len {options.max_model_len}")
    space = SearchSpace(model, options, efficiency, args.acceptance, args.quantised, fixed_options)
    with defer_interrupt() as signals:
        results, facts = search_plan(space, workload, goal, args, signals)
        facts["workload"]["too_long"] = len(full_workload.entries) - len(workload.entries)
        print(
            json.dumps(replace_infinities(facts))
            if args.json
            else render_workload(model, workload, goal, facts),
            flush=True,
        )
        if args.plot:
            plot_candidates(results, workload, goal, f"{model.name} on {model.target.name}", Path(args.plot))
    return 0


def search_plan(
    space: SearchSpace, workload: Workload, goal: SearchGoal, args: argparse.Namespace, signals: list[int]
) -> tuple[list[CandidateResult], dict[str, Any]]:
    """Return the simulated candidates, and all that is reported as plain numbers. After a signal the rest is
    skipped."""

    def clock() -> float:
        return math.inf if signals else time.monotonic()

    begin = time.monotonic()
    all_results = search_candidates(space, workload, goal, clock)
    results = [result for result in all_results if result.points]
    without_limits = simulate_without_each_limit(
        results[0], workload, goal, begin + 1.25 * goal.seconds, clock
    )
    records = [
        candidate_record(
            result, workload, goal, None if signals else size_fleet(result, workload, goal), args
        )
        for result in results[:MAX_SHOWN]
    ]
    return results, {
        "workload": workload_record(workload),
        "target": asdict(space.model.target),
        "efficiency": space.efficiency._asdict(),
        "limits": goal.slo._asdict() | {"share": goal.share},
        "answers": records,
        "without": without_limits,
        "estimated": [estimate_record(result) for result in all_results if not result.points],
        "refused": space.refused_layouts,
        "interrupted": bool(signals),
        "seconds": time.monotonic() - begin,
    }


def estimate_record(result: CandidateResult) -> dict[str, Any]:
    """Return a candidate that was not simulated, as plain numbers."""
    return {
        "name": result.candidate.name,
        "bears": result.steady.rate,
        "devices": result.candidate.num_devices,
    }


def workload_record(workload: Workload) -> dict[str, Any]:
    names = "rate", "prompt", "output", "shared", "longest"
    return {"requests": len(workload.entries)} | {name: getattr(workload, name) for name in names}


def candidate_record(
    result: CandidateResult,
    workload: Workload,
    goal: SearchGoal,
    fleet: tuple[int, LoadPoint] | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return a candidate as plain numbers: the load that it sustains, its bound, and the number of
    replicas and their figures for the workload's own rate (`fleet`)."""
    candidate, best = result.candidate, result.best_point(goal.share)
    full = None if best is None else best.rate * workload.output / candidate.num_devices
    facts: dict[str, Any] = {
        "name": candidate.name,
        "commands": candidate.start_commands(
            args.shape.upper() if args.shape else args.model, model_flag_words(args)
        ),
        "devices": candidate.num_devices,
        "bears": best and best.rate,
        "tokens_per_second_and_device": full,
        "full": best and best.outcome,
        "bound": result.steady.bound,
        "gains": dict(result.gains),
        "weights": candidate.fitted.weight_bytes,
        "cache": candidate.fitted.cache_bytes,
        "cached_tokens": candidate.fitted.cache_capacity_tokens,
        "points": [asdict(point) for point in result.points],
    }
    if best is None:
        facts["nearest"] = asdict(result.nearest_point) | {
            "line_grows": result.nearest_point.is_queue_growing
        }
    if fleet is not None:
        count, point = fleet
        facts |= {"replicas": count, "fits": count <= candidate.replicas, "seen": point.outcome}
    if args.price_per_hour and full:
        second = args.price_per_hour / 3600
        facts["price_full"] = second / full * 1e6
        if fleet is not None:
            facts["price"] = (
                second * fleet[0] * candidate.num_devices / (workload.rate * workload.output) * 1e6
            )
    return facts


def model_flag_words(args: argparse.Namespace) -> list[str]:
    """Return the flags that name the model, its source and its dtype."""
    values = {name: vars(args)[name] for name in MODEL_FLAGS}
    return [
        word
        for name, value in values.items()
        if value not in (None, "auto")
        for word in flag_words(name, value)
    ]


def replace_infinities(facts: Any) -> Any:
    """Replace infinite numbers by None, because JSON has no infinity."""
    if isinstance(facts, dict):
        return {str(name): replace_infinities(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [replace_infinities(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


# ---------------------------------------------------------------- as text


def render_workload(model: PlannedModel, workload: Workload, goal: SearchGoal, facts: dict[str, Any]) -> str:
    """Show the answer as text."""
    e, slo_limits = facts["efficiency"], goal.slo._asdict()
    limits = [
        f"{LIMIT_NAMES[name]} within {value:g} s" for name, value in slo_limits.items() if value < math.inf
    ]
    peaks = f"{e['compute']:.0%} of its arithmetic, {e['memory']:.0%} of its memory"
    head = (
        f"{model.name} in {model.dtype} on {model.target.name}, times from its peaks: {peaks}, "
        f"{e['call'] * 1e3:g} ms a call (nothing is measured)"
    )
    rate_text = f"{workload.rate:.3g} a second" if workload.rate < math.inf else "all there at once"
    count = "1 request" if len(workload.entries) == 1 else f"{len(workload.entries)} requests"
    requests_text = (
        f"{count}, {rate_text}: prompts of {workload.prompt:.0f} tokens "
        f"({workload.shared:.0%} of them as an earlier prompt begins), answers of {workload.output:.0f}"
    )
    too_long = facts["workload"]["too_long"]
    requests_text += f"; {too_long} more are longer than the model takes, and left out" if too_long else ""
    lines = [head, requests_text, f"{goal.share:.0%} of requests with {' and '.join(limits) or 'no limit'}"]
    if facts["interrupted"]:
        lines.append(f"interrupted after {facts['seconds']:.0f} s: what was found by then")
    for i, answer in enumerate(facts["answers"], 1):
        lines += ["", *render_candidate(i, answer, workload)]
    lines += [""] if facts["without"] else []
    best = facts["answers"][0]["bears"]
    for name, rate in facts["without"].items():
        more = f" ({rate / best - 1:+.0%})" if best else ""
        lines.append(
            f"without the limit on the {LIMIT_NAMES[name]} the first bears {rate:.3g} requests/s{more}"
        )
    if facts["estimated"]:
        rest = (
            f"{answer['name']} {answer['bears'] / answer['devices']:.3g}" for answer in facts["estimated"]
        )
        lines += ["", "not simulated, requests/s a device by the estimate alone: " + "; ".join(rest)]
    return "\n".join(lines)


def render_candidate(i: int, answer: dict[str, Any], workload: Workload) -> list[str]:
    """Show a candidate in a few lines."""
    if not answer["bears"]:
        tried, unborne = len(answer["points"]), "bears nothing within the limits"
        if tried < MAX_LOADS:
            unborne = f"bears none of the {tried} loads that there was time for (of {MAX_LOADS})"
        return [
            f"{i}. {answer['name']}: {unborne}; its bound is {answer['bound']}",
            *render_nearest_load(answer),
        ]
    full, devices_each = answer["full"], devices_text(answer["devices"])
    bears = (
        f"   one replica on {devices_each} bears {answer['bears']:.3g} requests/s, "
        f"{answer['tokens_per_second_and_device']:.0f} tokens/s a device; estimated bound: {answer['bound']}"
    )
    bubbles = f", {full['bubbles']:.0%} bubbles" if full["bubbles"] > 0.001 else ""
    memory = (
        f"   {answer['weights'] / 2**30:.1f} GiB of weights, {answer['cache'] / 2**30:.1f} of cache on a "
        f"device ({answer['cached_tokens']} tokens); at full load {full['peak_cache_occupancy']:.0%} of it, "
        f"{full['preemptions']} preemptions, {full['padding']:.0%} padding{bubbles}"
    )
    lines = [f"{i}. {answer['name']}", bears, *render_replicas(answer, workload), memory]
    if answer["gains"]:
        gains = ", ".join(
            f"{name} {gain - 1:+.0%}" if gain < math.inf else f"{name} from nothing"
            for name, gain in answer["gains"].items()
        )
        lines.append(f"   knobs that were changed, and what each gave by the estimate: {gains}")
    if "price_full" in answer:
        now = f"{answer['price']:.3g} at this load, " if "price" in answer else ""
        lines.append(f"   a million generated tokens cost {now}{answer['price_full']:.3g} at full load")
    return [*lines, *(f"   {command}" for command in answer["commands"])]


def render_nearest_load(answer: dict[str, Any]) -> list[str]:
    """Show the load that came nearest to the limits, for an engine that sustains none."""
    best = answer["nearest"]
    share, spans = best["outcome"]["in_time"], latencies_text(best["outcome"])
    grows = ", and the line of those that wait grows" if best["line_grows"] else ""
    line = f"at {best['rate']:.3g} requests/s and a replica {share:.1%} of those looked at are in time{grows}"
    return [f"   {line}: {spans}"]


def render_replicas(answer: dict[str, Any], workload: Workload) -> list[str]:
    """Show how many replicas the workload's own rate takes, and the latencies of its requests."""
    if "replicas" not in answer:
        return []
    fits = "" if answer["fits"] else " (MORE THAN THE TARGET HAS)"
    total, spans = devices_text(answer["replicas"] * answer["devices"]), latencies_text(answer["seen"])
    return [f"   {workload.rate:.3g} requests/s take {answer['replicas']} of them, {total}{fits}: {spans}"]


def latencies_text(outcome: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} p50 {milliseconds_text(outcome[key], 'p50')} p99 {milliseconds_text(outcome[key], 'p99')}"
        for name, key in (("first token", "ttft"), ("between tokens", "tpot"))
    )


def devices_text(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def milliseconds_text(spans: dict[str, float], which: str) -> str:
    return f"{spans[which] * 1e3:.3g} ms" if which in spans else "-"


# ---------------------------------------------------------------- as a picture


def plot_candidates(
    results: list[CandidateResult], workload: Workload, goal: SearchGoal, title: str, file: Path
) -> None:
    """Draw every simulated load, throughput against the time between tokens."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    figure, axis = import_module("matplotlib.pyplot").subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        points = sorted((p for p in result.points if p.outcome["tpot"]), key=lambda p: p.rate)
        x = [p.outcome["tpot"]["p99"] * 1e3 for p in points]
        y = [p.rate * workload.output / result.candidate.num_devices for p in points]
        axis.plot(x, y, marker="o", markersize=3, label=result.candidate.name)
    if goal.slo.tpot < math.inf:
        axis.axvline(goal.slo.tpot * 1e3, color="0.6", linestyle=":")
    axis.set(xlabel="p99 of the time between tokens, ms", ylabel="tokens/s a device", title=title)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
