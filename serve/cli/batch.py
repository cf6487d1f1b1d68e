"""`duetto batch`: answer a file of prompts. A killed job resumes where it stopped."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.huggingface import read_config
from ...sampling.params import SamplingParams
from ..engine.startup.cpu_kernels import decide_cpu_kernels
from ..engine.startup.dtype import compute_dtype
from ..engine.startup.model_folder import read_generation_defaults
from ..host.devices import default_device, memory_limit
from ..host.progress import progress_enabled
from ..jobs.batch.fingerprint import job_fingerprint
from ..jobs.batch.job import BatchOptions
from ..jobs.batch.run import JobFiles, run_batch
from ..options.engine import EngineOptions
from ..options.flags import parse_json_object, parse_positive, read_given_fields
from ..options.lora import parse_lora_modules
from ..runtime.compiled.jaxcache import enable_compilation_cache
from ..runtime.multihost.rendezvous import join_group
from ..text.tools.formats import find_tool_format
from . import common

if TYPE_CHECKING:
    from ..jobs.workers.worker_pool import WorkerPool


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help='JSON lines, in OpenAI\'s batch format or plain; "-" is standard input')
    parser.add_argument(
        "output", help='file for the answers, in the order of the input; "-" is standard output'
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lines without a seed (default: 0)")
    parser.add_argument(
        "--in-flight",
        type=parse_positive,
        metavar="INT",
        help="maximum lines in the engine (default: 4 max-num-seqs)",
    )
    parser.add_argument(
        "--model-name",
        default="duetto",
        help="name of the model in answers to lines that name none (default: duetto)",
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="STR",
        help="format of the model's tool calls, such as hermes (default: that of its chat template)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the progress of the start and of the job",
    )
    parser.add_argument(
        "--ray",
        type=parse_positive,
        metavar="INT",
        help="number of Ray actors with an engine each; needs duetto[ray]",
    )
    parser.add_argument(
        "--ray-options",
        type=parse_json_object,
        default={},
        metavar="JSON",
        help='resources of each Ray actor, such as {"num_gpus": 1}',
    )
    common.add_model_flags(parser)
    common.add_report_flags(parser)
    common.add_sampling_flags(
        parser,
        "for lines that do not set them",
        ("seed", "spaces_between_special_tokens"),
        {"max_tokens": "16; in a chat the model's length"},
    )
    common.add_engine_flags(parser)
    common.add_cache_flags(parser)


def check_ray_flags(args: argparse.Namespace) -> None:
    """End the program as a usage error for flags that Ray actors cannot have."""
    for name in ("load_cache", "save_cache") if args.ray else ():
        if vars(args)[name] is not None:
            args.usage_error(
                f"--{name.replace('_', '-')} is not allowed beside --ray: caches are the actors' own"
            )
    if args.ray and getattr(args, "audit_log", None) is not None:
        args.usage_error("--audit-log is not allowed beside --ray: each actor would write it")
    if args.ray and getattr(args, "nnodes", 1) > 1:
        args.usage_error("--nnodes is not allowed beside --ray: each actor is one process")


def start_actors(args: argparse.Namespace, options: EngineOptions) -> "WorkerPool":
    """Start engines in Ray actors, behind one pool."""
    from ...ray import RayBackend
    from ..engine.startup.model_source import ModelSource
    from ..jobs.workers.worker_pool import WorkerPool

    tokenizer, _ = ModelSource.resolve_names(args.model, args.tokenizer, weights=False).load_tokenizer()
    backend = RayBackend(
        common.llm_arguments(args, replace(options, use_tqdm_on_load=False)), args.ray_options
    )
    return WorkerPool(backend, args.ray, tokenizer, options)


def decide_dtype(args: argparse.Namespace, folder: Path, options: EngineOptions) -> tuple[str, EngineOptions]:
    """Return the dtype that decides the answers, and the options with `cpu_kernels` decided. For a job on Ray
    both stay as given: each actor's machine chooses, and answers name the choice."""
    if args.ray:
        return args.dtype, options
    enable_compilation_cache(None if args.compilation_cache == "none" else args.compilation_cache)
    stored = None if options.load_format == "dummy" else folder
    device, config = default_device(), read_config(folder)
    with progress_enabled(not args.quiet):
        options = decide_cpu_kernels(options, device, config, args.dtype)
    return str(compute_dtype(args.dtype, device, config, stored, options.cpu_kernels)), options


def progress_of(args: argparse.Namespace) -> Callable[[], int] | None:
    """Return a function that counts the bytes of answers that survive a lost run; None for streams."""
    if "-" in (args.input, args.output):
        return None
    journal = JobFiles(Path(os.path.realpath(args.output))).journal
    return lambda: journal.stat().st_size if journal.exists() else 0


def run(args: argparse.Namespace) -> int:
    common.check_output_files(args)
    check_ray_flags(args)
    if args.tool_call_parser is not None:
        common.exit_on_usage_error(args, lambda: find_tool_format(args.tool_call_parser))
    given_options = options = common.parse_engine_options(args)
    if options.speculation.acceptance == "rejection":
        args.usage_error(
            "--speculative-config: acceptance=rejection is not allowed in a batch: "
            "which tokens are drawn depends on what runs beside a line, "
            "so that a resumed job would not write the same answers; leave it out"
        )
    sampling = read_given_fields(SamplingParams, args, leave_out=("seed",))
    common.exit_on_usage_error(args, lambda: SamplingParams.from_dict(sampling))
    folder, options = common.resolve_hub_ids(args, options)
    sampling = options.default_sampling(read_generation_defaults(folder).sampling) | sampling
    join_group(given_options)
    adapters = common.exit_on_usage_error(args, lambda: parse_lora_modules(given_options.lora_modules))
    options = options.with_device_load(memory_limit(default_device()))
    job = BatchOptions(
        in_flight=args.in_flight or 4 * options.num_slots * (args.ray or 1),
        seed=args.seed,
        sampling=sampling,
        model_name=args.model_name,
        progress=args.progress and not args.quiet,
        explain=args.explain,
        save_cache=args.save_cache,
        adapters={request.lora_name: request for request in adapters},
        tool_call_parser=args.tool_call_parser,
    )
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    dtype, options = decide_dtype(args, folder, options)
    if default_device().platform != "cpu":  # answers name how the products of all programs are configured
        options = replace(options, background_compilation=False)
    start_engine = partial(
        common.start_llm if args.ray is None else start_actors,
        args,
        replace(options, max_prefill_delay=options.prefill_delay(is_awaited=False)),
    )
    if options.node_rank:
        start_engine()  # a rank above 0 runs until rank 0 ends
    return run_batch(
        start_engine,
        args.input,
        args.output,
        job,
        common.exit_on_usage_error(args, lambda: job_fingerprint(folder, tokenizer, dtype, options)),
        lambda report: common.show_and_save_report(report, args),
        args.report,
    )
