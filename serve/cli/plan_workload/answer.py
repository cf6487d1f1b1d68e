"""The search for what is asked, and what it has found as plain numbers."""

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...host.signals import uninterrupted
from ...options.engine import EngineOptions
from ...options.flags import given
from ...planner.simulation.candidates import Space, flag
from ...planner.simulation.search import CandidateResult, Point, SearchGoal, search, served, without
from ...planner.workloads.workload import Workload
from ..common import checked
from .flags import aim_of, efficiency_of, job_of, workload_of
from .picture import plot
from .text import render

SHOWN = 3  # candidates
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
