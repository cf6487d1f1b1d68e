"""`duetto plan`: the shapes, the memory and the floors of an engine, before anything is loaded or run."""

import argparse
from dataclasses import replace

from ..host.signals import restore_interrupt_handler
from ..planner.engine_plan import abstract_arguments, main_shapes, plan_engine
from ..planner.render import encode_plan, render_plan
from ..planner.roofline.cost_table import with_floor
from ..planner.roofline.presets import PRESETS
from ..planner.roofline.targets import find_target, local_target
from ..planner.stage_plans import measure_stage_programs, plan_stages
from ..runtime.compiled.jaxcache import enable_compilation_cache
from .common import add_engine_flags, add_model_flags, exit_on_usage_error, parse_engine_options
from .plan_workload import flags, plan_report


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
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
    flags.add_workload_flags(parser)
    add_engine_flags(parser, is_alone=True)


def run(args: argparse.Namespace) -> int:
    """Print a plan. Raises ValueError for options that cannot be planned."""
    restore_interrupt_handler()
    options = parse_engine_options(args)
    if args.shape and args.model:
        raise ValueError(f"--model {args.model} is not allowed with --shape {args.shape}: one of them")
    if args.workload is not None:
        return plan_report.print_workload_plan(args, options)
    exit_on_usage_error(args, lambda: flags.check_no_workload_flags(args))
    if args.target and args.measure:
        raise ValueError("--measure is for this machine: it cannot go with --target")
    if not args.target:
        enable_compilation_cache(None if args.compilation_cache == "none" else args.compilation_cache)
    target = find_target(args.target) if args.target else local_target()
    where = {"revision": args.revision, "download_dir": args.download_dir}
    plan = plan_engine(args.model, args.shape, args.dtype, options, target, args.context, **where)
    arguments = abstract_arguments(plan)
    choices = {"main": main_shapes(plan.shapes), "all": plan.shapes, "none": []}
    if args.measure and options.num_device_groups > 1:
        name = "pipeline_parallel_size" if options.pipeline_parallel_size > 1 else "experimental_ffn_devices"
        raise ValueError(f"--measure is not allowed with {name}: it runs one program")
    plans = plan_stages(plan, arguments, choices[args.compile])
    if args.measure:
        (measured_plan,) = [measure_stage_programs(plan, arguments, stage) for stage in plans]
        # last: its arrays must not count as the plan's memory
        plan = replace(plan, target=local_target(measure=True))
        plans = [
            replace(
                measured_plan, rows=[with_floor(row, plan.target, plan.dtype) for row in measured_plan.rows]
            )
        ]
    print((encode_plan if args.json else render_plan)(plan, arguments, plans))
    return 0
