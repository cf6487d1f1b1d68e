"""`duetto plan`: the shapes, the memory and the floors of an engine, before anything is loaded or run."""

import argparse
from dataclasses import replace

from ..host.signals import raise_on_interrupt
from ..planner.planning import abstract_arguments, main_shapes, plan_job
from ..planner.render import as_json, render
from ..planner.roofline.presets import PRESETS
from ..planner.roofline.table import floored
from ..planner.roofline.targets import find_target, here
from ..planner.stage_plans import measured, stage_plans
from ..runtime.compiled.jaxcache import keep_compiled
from .common import checked, engine_flags, engine_options, model_flags
from .plan_workload import answer, flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    model_flags(parser)
    parser.add_argument("--shape", choices=sorted(PRESETS), help="sizes of a known model, instead of --model")
    parser.add_argument(
        "--target",
        help="accelerator to plan for: t4, l4, a100, h200, 8xh200, v6e:2x4, ... (default: this machine)",
    )
    parser.add_argument(
        "--context",
        type=int,
        help="tokens in the KV cache of each row (default: 1024, or max-model-len if smaller)",
    )
    parser.add_argument(
        "--compile", choices=("main", "all", "none"), default="main",
        help="programs to compile: main (default) is the largest prefill and the widest decode",
    )  # fmt: skip
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the compiled programs on this machine, and print its peaks, their times and their memory",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    flags.add_flags(parser)
    engine_flags(parser, alone=True)


def run(args: argparse.Namespace) -> int:
    """Prints a plan. Raises ValueError for what cannot be planned."""
    raise_on_interrupt()
    options = engine_options(args)
    if args.shape and args.model:
        raise ValueError(f"--model {args.model} is not allowed with --shape {args.shape}: one of them")
    if args.workload is not None:
        return answer.run(args, options)
    checked(args, lambda: flags.refuse_flags(args))
    if args.target and args.measure:
        raise ValueError("--measure is for this machine: it cannot go with --target")
    if not args.target:
        keep_compiled(None if args.compilation_cache == "none" else args.compilation_cache)
    target = find_target(args.target) if args.target else here()
    where = {"revision": args.revision, "download_dir": args.download_dir}
    plan = plan_job(args.model, args.shape, args.dtype, options, target, args.context, **where)
    arguments = abstract_arguments(plan)
    choices = {"main": main_shapes(plan.shapes), "all": plan.shapes, "none": []}
    if args.measure and options.stations > 1:
        name = "pipeline_parallel_size" if options.pipeline_parallel_size > 1 else "experimental_ffn_devices"
        raise ValueError(f"--measure is not allowed with {name}: it runs one program")
    found = stage_plans(plan, arguments, choices[args.compile])
    if args.measure:
        (own,) = [measured(plan, arguments, stage) for stage in found]
        # last: its arrays must not count as the plan's memory
        plan = replace(plan, target=here(measure=True))
        found = [replace(own, rows=[floored(row, plan.target, plan.dtype) for row in own.rows])]
    print((as_json if args.json else render)(plan, arguments, found))
    return 0
