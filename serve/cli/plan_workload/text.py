"""The answer as text."""

import math
from typing import Any

from ...planner.simulation.fitting import PlannedModel
from ...planner.simulation.search import TRIES, SearchGoal
from ...planner.workloads.workload import Workload

LIMITS = {"ttft": "first token", "tpot": "time between tokens"}


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
        return [f"{i}. {own['name']}: {unborne(own)}; its bound is {own['bound']}", *nearest(own)]
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


def unborne(own: dict[str, Any]) -> str:
    if len(own["points"]) < TRIES:
        return f"bears none of the {len(own['points'])} loads that there was time for (of {TRIES})"
    return "bears nothing within the limits"


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
