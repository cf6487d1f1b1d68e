"""Flags of `duetto plan --workload`, and the limits, workload, model and target that they state."""

import argparse
import math
import os
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ....checkpoints.huggingface import read_config
from ....refusals import require
from ...engine.startup.dtype import dtype_name
from ...engine.startup.folder import read_shapes
from ...engine.startup.origin import Origin, stored_form
from ...options.engine import EngineOptions, round_up
from ...planner.roofline.presets import PRESETS
from ...planner.roofline.targets import known_target
from ...planner.simulation.fitting import PlannedModel
from ...planner.simulation.search import SearchGoal
from ...planner.simulation.times import STATED, Efficiency
from ...planner.workloads.tally import SLO
from ...planner.workloads.traces import TraceEntry, drawn, read
from ...planner.workloads.workload import Workload
from ..common import checked

READ = 4000  # lines of a trace
DEFAULTS = {
    "ttft": math.inf, "tpot": math.inf, "share": 0.99, "speed": 1.0, "price_per_hour": None,
    "acceptance": None, "quantised": False, "efficiency": f"{STATED.compute},{STATED.memory}",
    "search_seconds": 30.0, "plot": None,
}  # fmt: skip
COMPILED = {"context": None, "compile": "main", "measure": False}  # flags of a plan that compiles
CHOSEN = "kv_role", "kv_address", "prefill_devices", "decode_devices"  # prefill apart is the plan's to try


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "an answer for a workload", "simulated on a --target, from closed formulas: nothing is compiled"
    )
    group.add_argument(
        "--workload", metavar="FILE",
        help="a trace: Mooncake's lines (.jsonl: timestamp in ms, input_length, output_length, hash_ids), "
        f"or Azure's table (.csv), the first {READ} of either; or RATE,PROMPT,OUTPUT: requests a second and "
        "mean tokens, drawn",
    )  # fmt: skip
    group.add_argument("--ttft", type=float, help="seconds to the first token, at most")
    group.add_argument("--tpot", type=float, help="seconds between tokens, at most")
    group.add_argument("--share", type=float, help="of requests that keep both limits (default: %(default)s)")
    group.add_argument("--speed", type=float, help="play the trace so many times as fast")
    group.add_argument("--price-per-hour", type=float, help="of one device: adds the cost of tokens")
    group.add_argument(
        "--acceptance", type=float, help="of a guess: considers speculation that guesses right so often"
    )
    group.add_argument(
        "--quantised", action="store_true", help="consider 8 bits for weights and keys too (answers change)"
    )
    group.add_argument(
        "--efficiency", metavar="COMPUTE,MEMORY",
        help="shares of the target's peaks that programs reach (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--search-seconds", type=float, help="of simulations (default: 30)")
    group.add_argument(
        "--plot", metavar="FILE", help="throughput against latency as a picture (.svg, .png, ...; matplotlib)"
    )
    parser.set_defaults(**DEFAULTS)


def refuse_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag that says something of a workload, where there is none."""
    for name, default in DEFAULTS.items():
        if vars(args)[name] != default:
            raise ValueError(f"--{name.replace('_', '-')} is not allowed without --workload")


def aim_of(args: argparse.Namespace, options: EngineOptions) -> SearchGoal:
    """Raises ValueError for limits that nothing keeps, and for what has no meaning here."""
    own, model, price = vars(args), options.speculation.model, args.price_per_hour
    require(bool(args.target), "--workload needs a --target, such as h200 or 8xh200")
    for name, default in COMPILED.items():
        require(own[name] == default, f"--{name} is not allowed with --workload: nothing is compiled")
    for name in CHOSEN:
        value = getattr(options, name)
        require(value is None, f"{name} {value!r} is not allowed with --workload: it is tried there")
    refusal = f"speculative_config: model {model!r} is not allowed with --workload: "
    require(model is None, refusal + "ngram and suffix, whose guesses take no time")
    is_known = not options.guesses or args.acceptance is not None
    require(is_known, "speculative_config is not allowed with --workload without --acceptance")
    for name in ("ttft", "tpot", "speed", "search_seconds"):
        require(own[name] > 0, f"--{name.replace('_', '-')} {own[name]} is not allowed: above 0")
    is_price = price is None or 0 < price < math.inf
    require(is_price, f"--price-per-hour {price} is not allowed: above 0, not infinite")
    if args.plot is not None:
        check_picture(Path(args.plot))
    require(0 < args.share <= 1, f"--share {args.share} is not allowed: above 0, at most 1")
    is_share = args.acceptance is None or 0 <= args.acceptance <= 1
    require(is_share, f"--acceptance {args.acceptance} is not allowed: 0 to 1")
    return SearchGoal(SLO(args.ttft, args.tpot), args.share, args.search_seconds)


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
    file = Path(args.workload)
    words = [] if file.exists() else args.workload.split(",")
    entries = checked(args, lambda: drawn_of(args.workload)) if len(words) == 3 else islice(read(file), READ)
    load = Workload.of(entries)
    if not load.entries:
        raise ValueError(f"--workload {args.workload} has no request")
    load = load.faster(args.speed)
    if not load.rate > 0:
        raise ValueError(f"--speed {args.speed} is not allowed: requests do not come")
    return load


def drawn_of(text: str) -> list[TraceEntry]:
    try:
        rate, prompt, output = map(float, text.split(","))
    except ValueError:
        rate = prompt = output = math.nan
    if not (rate > 1e-9 and 1 <= prompt < 1 << 31 and 1 <= output < 1 << 31):
        raise ValueError(
            f"--workload {text} is not allowed: a file that is there, or requests a second above 0 and mean "
            "tokens of 1 or more, such as 5,1000,250"
        )
    return list(drawn(READ, rate, prompt, output))


def job_of(
    args: argparse.Namespace, options: EngineOptions, load: Workload
) -> tuple[PlannedModel, EngineOptions]:
    """The model on the target, and the options with a length that holds the workload."""
    name = "bfloat16" if dtype_name(args.dtype) == "auto" else str(jnp.dtype(dtype_name(args.dtype)))
    target = known_target(args.target)
    if args.shape:
        options.require_unstored("a shape has no checkpoint")
        own = PRESETS[args.shape]  # sizes: how far its positions reach is no part of them
        longest = max(own.max_position, round_up(load.longest, 256))
        job = PlannedModel(args.shape, replace(own, max_position=longest), target, name)
    else:
        folder = Origin.of(args.model, revision=args.revision, download_dir=args.download_dir).model
        options = options_with(options, quantization=stored_form(folder, options.quantization))
        shapes = partial(read_shapes, folder, name)
        job = PlannedModel(args.model or "the demo model", read_config(folder), target, name, shapes)
    longest = min(round_up(load.longest, 256), job.config.max_position)
    return job, options_with(options, max_model_len=options.max_model_len or longest)


def options_with(options: EngineOptions, **changes: Any) -> EngineOptions:
    return EngineOptions(**(asdict(options) | changes))


def check_picture(file: Path) -> None:
    """Raises ValueError where no picture can be written."""
    try:
        kinds = import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    except ImportError as error:
        raise ValueError(f"--plot is not allowed: there is no {error.name}; pip install matplotlib") from None
    if file.suffix[1:] not in kinds:
        raise ValueError(f"--plot {file} is not allowed: its ending is one of {', '.join(sorted(kinds))}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--plot {file} is not allowed: no file can be written there")
