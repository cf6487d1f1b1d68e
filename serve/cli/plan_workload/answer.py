"""The search for an engine, and its answer as plain numbers, as text and as a picture."""

import argparse
import json
import math
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from ...host.signals import uninterrupted
from ...options.engine import EngineOptions
from ...options.flags import given
from ...planner.simulation.candidates import Space, flag
from ...planner.simulation.fitting import PlannedModel
from ...planner.simulation.search import TRIES, CandidateResult, Point, SearchGoal, search, served, without
from ...planner.workloads.workload import Workload
from ..common import checked
from .flags import aim_of, efficiency_of, job_of, workload_of

SHOWN = 3  # candidates
LIMITS = {"ttft": "first token", "tpot": "time between tokens"}
FROM = "dtype", "revision", "tokenizer", "tokenizer_revision", "download_dir"  # flags of the model


def run(args: argparse.Namespace, options: EngineOptions) -> int:
    """Prints the answer; of a search that Ctrl-C ends, what it has found. Raises ValueError for what cannot
    be planned."""
    aim, efficiency = checked(args, lambda: (aim_of(args, options), efficiency_of(args)))
    fixed = frozenset(given(EngineOptions, args))
    asked = workload_of(args)
    job, options = job_of(args, options, asked)
    load = asked.within(options.max_model_len or asked.longest)
    if not load.entries:
        raise ValueError(f"every request of --workload is longer than max_model_len {options.max_model_len}")
    space = Space(job, options, efficiency, args.acceptance, args.quantised, fixed)
    with uninterrupted() as heard:
        found, facts = answered(space, load, aim, args, heard)
        facts["workload"]["too_long"] = len(asked.entries) - len(load.entries)
        print(json.dumps(finite(facts)) if args.json else render(job, load, aim, facts), flush=True)
        if args.plot:
            plot(found, load, aim, f"{job.name} on {job.target.name}", Path(args.plot))
    return 0


def answered(
    space: Space, load: Workload, aim: SearchGoal, args: argparse.Namespace, heard: list[int]
) -> tuple[list[CandidateResult], dict[str, Any]]:
    """Return the simulated candidates, and all that is reported as plain numbers. After a signal the rest is
    left out."""

    def clock() -> float:
        return math.inf if heard else time.monotonic()

    begin = time.monotonic()
    every = search(space, load, aim, clock)
    found = [answer for answer in every if answer.points]
    more = without(found[0], load, aim, begin + 1.25 * aim.seconds, clock)
    told = [
        describe(answer, load, aim, None if heard else served(answer, load, aim), args)
        for answer in found[:SHOWN]
    ]
    return found, {
        "workload": summary(load),
        "target": asdict(space.job.target),
        "efficiency": space.efficiency._asdict(),
        "limits": aim.within._asdict() | {"share": aim.share},
        "answers": told,
        "without": more,
        "estimated": [estimated(answer) for answer in every if not answer.points],
        "refused": space.refused,
        "interrupted": bool(heard),
        "seconds": time.monotonic() - begin,
    }


def estimated(answer: CandidateResult) -> dict[str, Any]:
    """A candidate that was not simulated."""
    return {"name": answer.candidate.name, "bears": answer.steady.rate, "devices": answer.candidate.devices}


def summary(load: Workload) -> dict[str, Any]:
    names = "rate", "prompt", "output", "shared", "longest"
    return {"requests": len(load.entries)} | {name: getattr(load, name) for name in names}


def describe(
    answer: CandidateResult,
    load: Workload,
    aim: SearchGoal,
    at: tuple[int, Point] | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A candidate with what it bears, what the workload would see, and why, as plain numbers."""
    own, borne = answer.candidate, answer.borne(aim.share)
    full = None if borne is None else borne.rate * load.output / own.devices
    facts: dict[str, Any] = {
        "name": own.name,
        "commands": own.commands(args.shape.upper() if args.shape else args.model, model_words(args)),
        "devices": own.devices,
        "bears": borne and borne.rate,
        "tokens_per_second_and_device": full,
        "full": borne and borne.outcome,
        "bound": answer.steady.bound,
        "gains": dict(answer.gains),
        "weights": own.fitted.weights,
        "cache": own.fitted.cache,
        "cached_tokens": own.fitted.cached_tokens,
        "points": [asdict(point) for point in answer.points],
    }
    if borne is None:
        facts["nearest"] = asdict(answer.nearest) | {"line_grows": answer.nearest.line_grows}
    if at is not None:
        count, point = at
        facts |= {"replicas": count, "fits": count <= own.replicas, "seen": point.outcome}
    if args.price_per_hour and full:
        second = args.price_per_hour / 3600
        facts["price_full"] = second / full * 1e6
        if at is not None:
            facts["price"] = second * at[0] * own.devices / (load.rate * load.output) * 1e6
    return facts


def model_words(args: argparse.Namespace) -> list[str]:
    """Return the flags that name the model, its source and its dtype."""
    said = {name: vars(args)[name] for name in FROM}
    return [word for name, value in said.items() if value not in (None, "auto") for word in flag(name, value)]


def finite(facts: Any) -> Any:
    """Numbers without a limit as null: JSON has no infinity."""
    if isinstance(facts, dict):
        return {str(name): finite(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


# ---------------------------------------------------------------- as text


def render(job: PlannedModel, load: Workload, aim: SearchGoal, facts: dict[str, Any]) -> str:
    """The answer as text."""
    e, kept = facts["efficiency"], aim.within._asdict()
    limits = [f"{LIMITS[name]} within {value:g} s" for name, value in kept.items() if value < math.inf]
    peaks = f"{e['compute']:.0%} of its arithmetic, {e['memory']:.0%} of its memory"
    head = (
        f"{job.name} in {job.dtype} on {job.target.name}, times from its peaks: {peaks}, "
        f"{e['call'] * 1e3:g} ms a call (nothing is measured)"
    )
    often = f"{load.rate:.3g} a second" if load.rate < math.inf else "all there at once"
    count = "1 request" if len(load.entries) == 1 else f"{len(load.entries)} requests"
    asked = (
        f"{count}, {often}: prompts of {load.prompt:.0f} tokens "
        f"({load.shared:.0%} of them as an earlier prompt begins), answers of {load.output:.0f}"
    )
    too_long = facts["workload"]["too_long"]
    asked += f"; {too_long} more are longer than the model takes, and left out" if too_long else ""
    lines = [head, asked, f"{aim.share:.0%} of requests with {' and '.join(limits) or 'no limit'}"]
    if facts["interrupted"]:
        lines.append(f"interrupted after {facts['seconds']:.0f} s: what was found by then")
    for i, own in enumerate(facts["answers"], 1):
        lines += ["", *render_answer(i, own, load)]
    lines += [""] if facts["without"] else []
    best = facts["answers"][0]["bears"]
    for name, rate in facts["without"].items():
        more = f" ({rate / best - 1:+.0%})" if best else ""
        lines.append(f"without the limit on the {LIMITS[name]} the first bears {rate:.3g} requests/s{more}")
    if facts["estimated"]:
        rest = (f"{own['name']} {own['bears'] / own['devices']:.3g}" for own in facts["estimated"])
        lines += ["", "not simulated, requests/s a device by the estimate alone: " + "; ".join(rest)]
    return "\n".join(lines)


def render_answer(i: int, own: dict[str, Any], load: Workload) -> list[str]:
    """A candidate in a few lines."""
    if not own["bears"]:
        tried, unborne = len(own["points"]), "bears nothing within the limits"
        if tried < TRIES:
            unborne = f"bears none of the {tried} loads that there was time for (of {TRIES})"
        return [f"{i}. {own['name']}: {unborne}; its bound is {own['bound']}", *nearest(own)]
    full, each = own["full"], devices(own["devices"])
    bears = (
        f"   one replica on {each} bears {own['bears']:.3g} requests/s, "
        f"{own['tokens_per_second_and_device']:.0f} tokens/s a device; estimated bound: {own['bound']}"
    )
    bubbles = f", {full['bubbles']:.0%} bubbles" if full["bubbles"] > 0.001 else ""
    memory = (
        f"   {own['weights'] / 2**30:.1f} GiB of weights, {own['cache'] / 2**30:.1f} of cache on a device "
        f"({own['cached_tokens']} tokens); at full load {full['peak_cache_occupancy']:.0%} of it, "
        f"{full['preemptions']} preemptions, {full['padding']:.0%} padding{bubbles}"
    )
    lines = [f"{i}. {own['name']}", bears, *render_seen(own, load), memory]
    if own["gains"]:
        gains = ", ".join(
            f"{name} {gain - 1:+.0%}" if gain < math.inf else f"{name} from nothing"
            for name, gain in own["gains"].items()
        )
        lines.append(f"   knobs that were changed, and what each gave by the estimate: {gains}")
    if "price_full" in own:
        now = f"{own['price']:.3g} at this load, " if "price" in own else ""
        lines.append(f"   a million generated tokens cost {now}{own['price_full']:.3g} at full load")
    return [*lines, *(f"   {command}" for command in own["commands"])]


def nearest(own: dict[str, Any]) -> list[str]:
    """Show the load that came nearest to the limits, for an engine that bears none."""
    best = own["nearest"]
    share, spans = best["outcome"]["in_time"], seen(best["outcome"])
    grows = ", and the line of those that wait grows" if best["line_grows"] else ""
    line = f"at {best['rate']:.3g} requests/s and a replica {share:.1%} of those looked at are in time{grows}"
    return [f"   {line}: {spans}"]


def render_seen(own: dict[str, Any], load: Workload) -> list[str]:
    """Show how many replicas the workload's own rate takes, and what its requests see."""
    if "replicas" not in own:
        return []
    fits = "" if own["fits"] else " (MORE THAN THE TARGET HAS)"
    total, spans = devices(own["replicas"] * own["devices"]), seen(own["seen"])
    return [f"   {load.rate:.3g} requests/s take {own['replicas']} of them, {total}{fits}: {spans}"]


def seen(outcome: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} p50 {milli(outcome[key], 'p50')} p99 {milli(outcome[key], 'p99')}"
        for name, key in (("first token", "ttft"), ("between tokens", "tpot"))
    )


def devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def milli(spans: dict[str, float], which: str) -> str:
    return f"{spans[which] * 1e3:.3g} ms" if which in spans else "-"


# ---------------------------------------------------------------- as a picture


def plot(found: list[CandidateResult], load: Workload, aim: SearchGoal, title: str, file: Path) -> None:
    """Every load that was simulated, throughput against the time between tokens."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    figure, axis = import_module("matplotlib.pyplot").subplots(figsize=(7, 4.5), layout="constrained")
    for answer in found:
        points = sorted((p for p in answer.points if p.outcome["tpot"]), key=lambda p: p.rate)
        x = [p.outcome["tpot"]["p99"] * 1e3 for p in points]
        y = [p.rate * load.output / answer.candidate.devices for p in points]
        axis.plot(x, y, marker="o", markersize=3, label=answer.candidate.name)
    if aim.within.tpot < math.inf:
        axis.axvline(aim.within.tpot * 1e3, color="0.6", linestyle=":")
    axis.set(xlabel="p99 of the time between tokens, ms", ylabel="tokens/s a device", title=title)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
