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
from ....refusals import ensure
from ...engine.startup.dtype import normalise_dtype_name
from ...engine.startup.model_folder import read_param_shapes
from ...engine.startup.model_source import ModelSource, resolve_weight_options
from ...options.engine import EngineOptions, round_up
from ...planner.roofline.presets import PRESETS
from ...planner.roofline.targets import target_facts
from ...planner.simulation.memory_fit import PlannedModel
from ...planner.simulation.search import SearchGoal
from ...planner.simulation.step_times import STATED_EFFICIENCY, Efficiency
from ...planner.workloads.slo_stats import SLO
from ...planner.workloads.traces import TraceEntry, draw_requests, read_trace
from ...planner.workloads.workload import Workload
from ..common import exit_on_usage_error

MAX_TRACE_LINES = 4000  # lines of a trace, at most
FLAG_DEFAULTS = {
    "ttft": math.inf, "tpot": math.inf, "share": 0.99, "speed": 1.0, "price_per_hour": None,
    "acceptance": None, "quantised": False,
    "efficiency": f"{STATED_EFFICIENCY.compute},{STATED_EFFICIENCY.memory}",
    "search_seconds": 30.0, "plot": None,
}  # fmt: skip
COMPILE_FLAGS = {"context": None, "compile": "main", "measure": False}  # flags of a plan that compiles
# The search tries disaggregated prefill.
SEARCHED_OPTIONS = "kv_role", "kv_address", "prefill_devices", "decode_devices"


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "an answer for a workload", "simulated on a --target, from closed formulas: nothing is compiled"
    )
    group.add_argument(
        "--workload", metavar="FILE",
        help="a trace: Mooncake's lines (.jsonl: timestamp in ms, input_length, output_length, hash_ids), "
        f"or Azure's table (.csv), the first {MAX_TRACE_LINES} of either; or RATE,PROMPT,OUTPUT: requests a "
        "second and mean tokens, drawn",
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
    parser.set_defaults(**FLAG_DEFAULTS)


def check_no_workload_flags(args: argparse.Namespace) -> None:
    """Check that no flag of a workload is set without one. Raises ValueError."""
    for name, default in FLAG_DEFAULTS.items():
        if vars(args)[name] != default:
            raise ValueError(f"--{name.replace('_', '-')} is not allowed without --workload")


def read_goal(args: argparse.Namespace, options: EngineOptions) -> SearchGoal:
    """Return the limits of the flags. Raises ValueError for limits that no request can keep, and for flags
    without a meaning here."""
    values, model, price = vars(args), options.speculation.model, args.price_per_hour
    ensure(bool(args.target), "--workload needs a --target, such as h200 or 8xh200")
    for name, default in COMPILE_FLAGS.items():
        ensure(values[name] == default, f"--{name} is not allowed with --workload: nothing is compiled")
    for name in SEARCHED_OPTIONS:
        value = getattr(options, name)
        ensure(value is None, f"{name} {value!r} is not allowed with --workload: it is tried there")
    refusal = f"speculative_config: model {model!r} is not allowed with --workload: "
    ensure(model is None, refusal + "ngram and suffix, whose guesses take no time")
    is_known = not options.max_draft_tokens or args.acceptance is not None
    ensure(is_known, "speculative_config is not allowed with --workload without --acceptance")
    for name in ("ttft", "tpot", "speed", "search_seconds"):
        ensure(values[name] > 0, f"--{name.replace('_', '-')} {values[name]} is not allowed: above 0")
    is_price = price is None or 0 < price < math.inf
    ensure(is_price, f"--price-per-hour {price} is not allowed: above 0, not infinite")
    if args.plot is not None:
        check_plot_file(Path(args.plot))
    ensure(0 < args.share <= 1, f"--share {args.share} is not allowed: above 0, at most 1")
    is_share = args.acceptance is None or 0 <= args.acceptance <= 1
    ensure(is_share, f"--acceptance {args.acceptance} is not allowed: 0 to 1")
    return SearchGoal(SLO(args.ttft, args.tpot), args.share, args.search_seconds)


def read_efficiency(args: argparse.Namespace) -> Efficiency:
    try:
        compute, memory = map(float, args.efficiency.split(","))
    except ValueError:
        compute = memory = 0.0
    if not (0 < compute <= 1 and 0 < memory <= 1):
        raise ValueError(f"--efficiency {args.efficiency} is not allowed: two shares, such as 0.6,0.75")
    return STATED_EFFICIENCY._replace(compute=compute, memory=memory)


def read_workload(args: argparse.Namespace) -> Workload:
    """Return the first lines of the trace, or a drawn workload. Raises ValueError for one without a
    request."""
    file = Path(args.workload)
    words = [] if file.exists() else args.workload.split(",")
    entries = (
        exit_on_usage_error(args, lambda: draw_trace_entries(args.workload))
        if len(words) == 3
        else islice(read_trace(file), MAX_TRACE_LINES)
    )
    workload = Workload.from_entries(entries)
    if not workload.entries:
        raise ValueError(f"--workload {args.workload} has no request")
    workload = workload.with_speed(args.speed)
    if not workload.rate > 0:
        raise ValueError(f"--speed {args.speed} is not allowed: requests do not come")
    return workload


def draw_trace_entries(text: str) -> list[TraceEntry]:
    try:
        rate, prompt, output = map(float, text.split(","))
    except ValueError:
        rate = prompt = output = math.nan
    if not (rate > 1e-9 and 1 <= prompt < 1 << 31 and 1 <= output < 1 << 31):
        raise ValueError(
            f"--workload {text} is not allowed: a file that is there, or requests a second above 0 and mean "
            "tokens of 1 or more, such as 5,1000,250"
        )
    return list(draw_requests(MAX_TRACE_LINES, rate, prompt, output))


def read_model_and_options(
    args: argparse.Namespace, options: EngineOptions, workload: Workload
) -> tuple[PlannedModel, EngineOptions]:
    """Return the model on the target, and the options with a length that holds the workload."""
    name = (
        "bfloat16"
        if normalise_dtype_name(args.dtype) == "auto"
        else str(jnp.dtype(normalise_dtype_name(args.dtype)))
    )
    target = target_facts(args.target)
    if args.shape:
        options.refuse_checkpoint_quantization("a shape has no checkpoint")
        preset = PRESETS[args.shape]  # a preset fixes no maximum position
        longest = max(preset.max_position, round_up(workload.longest, 256))
        model = PlannedModel(args.shape, replace(preset, max_position=longest), target, name)
    else:
        folder = ModelSource.resolve_names(
            args.model, revision=args.revision, download_dir=args.download_dir
        ).model_folder
        options = resolve_weight_options(folder, options)
        shapes = partial(read_param_shapes, folder, name)
        model = PlannedModel(args.model or "the demo model", read_config(folder), target, name, shapes)
    longest = min(round_up(workload.longest, 256), model.config.max_position)
    return model, change_options(options, max_model_len=options.max_model_len or longest)


def change_options(options: EngineOptions, **changes: Any) -> EngineOptions:
    return EngineOptions(**(asdict(options) | changes))


def check_plot_file(file: Path) -> None:
    """Check that a picture can be written. Raises ValueError if not."""
    try:
        kinds = import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    except ImportError as error:
        raise ValueError(f"--plot is not allowed: there is no {error.name}; pip install matplotlib") from None
    if file.suffix[1:] not in kinds:
        raise ValueError(f"--plot {file} is not allowed: its ending is one of {', '.join(sorted(kinds))}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--plot {file} is not allowed: no file can be written there")
