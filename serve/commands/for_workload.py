"""What `duetto plan --workload` answers: which knobs and layout bear a workload within limits on devices that
need not be here, how many of them, and what they cost."""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ...checkpoints.huggingface import read_config
from ..loading.dtype import dtype_name
from ..loading.folder import read_shapes
from ..loading.origin import Origin, stored_form
from ..options.engine import EngineOptions, round_up
from ..roofline.presets import PRESETS
from ..roofline.targets import known_target
from ..simulation.candidates import Space
from ..simulation.fitting import Job
from ..simulation.search import Aim, Answer, Point, search, served, without
from ..simulation.tally import Within
from ..simulation.times import STATED, Efficiency
from ..simulation.traces import drawn, read
from ..simulation.workload import Workload
from .command import checked

SHOWN = 3  # candidates
READ = 4000  # lines of a trace
LIMITS = {"ttft": "first token", "tpot": "time between tokens"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "an answer for a workload", "simulated on a --target, from closed formulas: nothing is compiled"
    )
    group.add_argument(
        "--workload", metavar="FILE",
        help="a trace: Mooncake's lines (.jsonl: timestamp in ms, input_length, output_length, hash_ids), "
        "Azure's table (.csv); or RATE,PROMPT,OUTPUT: requests a second and mean tokens, drawn",
    )  # fmt: skip
    group.add_argument("--ttft", type=float, default=math.inf, help="seconds to the first token, at most")
    group.add_argument("--tpot", type=float, default=math.inf, help="seconds between tokens, at most")
    group.add_argument(
        "--share", type=float, default=0.99, help="of requests that keep both limits (default: 0.99)"
    )
    group.add_argument("--speed", type=float, default=1.0, help="play the trace so many times as fast")
    group.add_argument("--price-per-hour", type=float, help="of one device: adds the cost of tokens")
    group.add_argument(
        "--acceptance", type=float, help="of a guess: considers speculation that guesses right so often"
    )
    group.add_argument(
        "--quantised", action="store_true", help="consider 8 bits for weights and keys too (answers change)"
    )
    group.add_argument(
        "--efficiency", default=f"{STATED.compute},{STATED.memory}", metavar="COMPUTE,MEMORY",
        help="shares of the target's peaks that programs reach (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--search-seconds", type=float, default=30.0, help="of simulations (default: 30)")
    group.add_argument("--plot", metavar="FILE", help="throughput against latency as a picture (matplotlib)")


def run(args: argparse.Namespace, options: EngineOptions) -> int:
    """Prints the answer. Raises ValueError for what cannot be planned."""
    aim = checked(args, lambda: aim_of(args))
    asked = workload_of(args)
    job, options = job_of(args, options, asked)
    load = asked.within(options.max_model_len or asked.longest)
    if not load.entries:
        raise ValueError(f"every request has more than the {options.max_model_len} tokens that are allowed")
    space = Space(job, options, efficiency_of(args), args.acceptance, args.quantised)
    begin = time.monotonic()
    every = search(space, load, aim)
    found = [answer for answer in every if answer.points]
    more = without(found[0], load, aim, until=begin + 1.25 * aim.seconds)
    own = [served(answer, load, aim) for answer in found[:SHOWN]]
    told = [describe(answer, load, aim, at, args) for answer, at in zip(found[:SHOWN], own, strict=True)]
    if args.plot:
        plot(found, load, aim, f"{job.name} on {job.target.name}", Path(args.plot))
    facts = {
        "workload": summary(load) | {"too_long": len(asked.entries) - len(load.entries)},
        "target": asdict(job.target),
        "efficiency": space.efficiency._asdict(),
        "limits": aim.within._asdict() | {"share": aim.share},
        "answers": told,
        "without": more,
        "estimated": [estimated(answer) for answer in every if not answer.points],
        "refused": space.refused,
        "seconds": time.monotonic() - begin,
    }
    print(json.dumps(finite(facts)) if args.json else render(job, load, aim, facts))
    return 0


def aim_of(args: argparse.Namespace) -> Aim:
    """Raises ValueError for limits that nothing keeps."""
    if not args.target:
        raise ValueError("--workload needs a --target, such as h200 or 8xh200")
    for name in ("ttft", "tpot", "speed", "search_seconds"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is not allowed: above 0")
    if not 0 < args.share <= 1:
        raise ValueError(f"--share {args.share} is not allowed: above 0, at most 1")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance {args.acceptance} is not allowed: 0 to 1")
    return Aim(Within(args.ttft, args.tpot), args.share, args.search_seconds)


def efficiency_of(args: argparse.Namespace) -> Efficiency:
    try:
        compute, memory = map(float, args.efficiency.split(","))
    except ValueError:
        compute = memory = 0.0
    if not (0 < compute <= 1 and 0 < memory <= 1):
        raise ValueError(f"--efficiency {args.efficiency} is not allowed: two shares, such as 0.6,0.75")
    return STATED._replace(compute=compute, memory=memory)


def workload_of(args: argparse.Namespace) -> Workload:
    """The first lines of the trace, or a drawn one. Raises ValueError for one without a request."""
    words = args.workload.split(",")
    if len(words) == 3:
        rate, prompt, output = (float(word) for word in words)
        entries = list(drawn(READ, rate * args.speed, prompt, output))
    else:
        entries = list(islice(read(Path(args.workload)), READ))
    if not entries:
        raise ValueError(f"--workload {args.workload} has no request")
    return Workload(sorted(entries, key=lambda e: e.arrival)).faster(1 if len(words) == 3 else args.speed)


def job_of(args: argparse.Namespace, options: EngineOptions, load: Workload) -> tuple[Job, EngineOptions]:
    """The model on the target, and the options with a length that holds the workload."""
    name = "bfloat16" if dtype_name(args.dtype) == "auto" else str(jnp.dtype(dtype_name(args.dtype)))
    target = known_target(args.target)
    if args.shape:
        options.require_unstored("a shape has no checkpoint")
        own = PRESETS[args.shape]  # sizes: how far its positions reach is no part of them
        longest = max(own.max_position, round_up(load.longest, 256))
        job = Job(args.shape, replace(own, max_position=longest), target, name)
    else:
        folder = Origin.of(args.model, revision=args.revision, download_dir=args.download_dir).model
        options = options_with(options, quantization=stored_form(folder, options.quantization))
        shapes = partial(read_shapes, folder, name)
        job = Job(args.model or "the demo model", read_config(folder), target, name, shapes)
    longest = min(round_up(load.longest, 256), job.config.max_position)
    return job, options_with(options, max_model_len=options.max_model_len or longest)


def options_with(options: EngineOptions, **changes: Any) -> EngineOptions:
    return EngineOptions(**(asdict(options) | changes))


# ---------------------------------------------------------------- what is told


def estimated(answer: Answer) -> dict[str, Any]:
    """A candidate that was not simulated."""
    return {"name": answer.candidate.name, "bears": answer.steady.rate, "devices": answer.candidate.devices}


def summary(load: Workload) -> dict[str, Any]:
    names = "rate", "prompt", "output", "shared", "longest"
    return {"requests": len(load.entries)} | {name: getattr(load, name) for name in names}


def describe(
    answer: Answer, load: Workload, aim: Aim, at: tuple[int, Point] | None, args: argparse.Namespace
) -> dict[str, Any]:
    """A candidate with what it bears, what the workload would see, and why, as plain numbers."""
    own, borne = answer.candidate, answer.borne(aim.share)
    full = None if borne is None else borne.rate * load.output / own.devices
    facts: dict[str, Any] = {
        "name": own.name,
        "commands": own.commands(args.shape.upper() if args.shape else args.model),
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
    if at is not None:
        count, point = at
        facts |= {"replicas": count, "fits": count <= own.replicas, "seen": point.outcome}
    if args.price_per_hour and full:
        second = args.price_per_hour / 3600
        facts["price_full"] = second / full * 1e6
        if at is not None:
            facts["price"] = second * at[0] * own.devices / (load.rate * load.output) * 1e6
    return facts


def finite(facts: Any) -> Any:
    """Numbers without a limit as null: JSON has no infinity."""
    if isinstance(facts, dict):
        return {str(name): finite(value) for name, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [finite(value) for value in facts]
    return None if isinstance(facts, float) and not math.isfinite(facts) else facts


def render(job: Job, load: Workload, aim: Aim, facts: dict[str, Any]) -> str:
    """The answer as text."""
    e, kept = facts["efficiency"], aim.within._asdict()
    limits = [f"{LIMITS[name]} within {value:g} s" for name, value in kept.items() if value < math.inf]
    peaks = f"{e['compute']:.0%} of its arithmetic, {e['memory']:.0%} of its memory"
    head = (
        f"{job.name} in {job.dtype} on {job.target.name}, times from its peaks: {peaks}, "
        f"{e['call'] * 1e3:g} ms a call (nothing is measured)"
    )
    asked = (
        f"{len(load.entries)} requests, {load.rate:.3g} a second: prompts of {load.prompt:.0f} tokens "
        f"({load.shared:.0%} of them as an earlier prompt begins), answers of {load.output:.0f}"
    )
    too_long = facts["workload"]["too_long"]
    asked += f"; {too_long} more are longer than the model takes, and left out" if too_long else ""
    lines = [head, asked, f"{aim.share:.0%} of requests with {' and '.join(limits) or 'no limit'}"]
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
        return [
            f"{i}. {own['name']}: bears nothing within the limits; its bound is {own['bound']}",
            *nearest(own),
        ]
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
        gains = ", ".join(f"{name} {gain - 1:+.0%}" for name, gain in own["gains"].items())
        lines.append(f"   knobs that were changed, and what each gave by the estimate: {gains}")
    if "price_full" in own:
        now = f"{own['price']:.3g} at this load, " if "price" in own else ""
        lines.append(f"   a million generated tokens cost {now}{own['price_full']:.3g} at full load")
    return [*lines, *(f"   {command}" for command in own["commands"])]


def nearest(own: dict[str, Any]) -> list[str]:
    """Of an engine that bears nothing, the load that came nearest to it."""
    if not own["points"]:
        return []
    best = max(own["points"], key=lambda point: point["outcome"]["in_time"])
    share, spans = best["outcome"]["in_time"], seen(best["outcome"])
    line = (
        f"at {best['rate']:.3g} requests/s and a replica {share:.1%} of those looked at are in time: {spans}"
    )
    return [f"   {line}"]


def render_seen(own: dict[str, Any], load: Workload) -> list[str]:
    """How many replicas the workload's own rate takes, and what its requests see."""
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


def plot(found: list[Answer], load: Workload, aim: Aim, title: str, file: Path) -> None:
    """Every load that was simulated, throughput against the time between tokens. Raises ImportError without
    matplotlib."""
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
    figure.savefig(file, metadata={"Date": None})
