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
from ..engine.startup.cpu_kernels import with_kernels
from ..engine.startup.dtype import compute_dtype
from ..engine.startup.folder import checked_defaults
from ..host.devices import default_device, memory_limit
from ..host.progress import telling
from ..jobs.batch.fingerprint import fingerprint
from ..jobs.batch.job import BatchOptions
from ..jobs.batch.run import JobFiles, run_batch
from ..options.engine import EngineOptions
from ..options.flags import given, json_object, positive
from ..options.lora import modules_of
from ..runtime.compiled.jaxcache import keep_compiled
from ..runtime.multihost.rendezvous import join
from ..text.tools.formats import format_named
from . import common

if TYPE_CHECKING:
    from ..jobs.workers.remote import WorkerPool


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help='JSON lines, in OpenAI\'s batch format or plain; "-" is standard input')
    parser.add_argument(
        "output", help='file for the answers, in the order of the input; "-" is standard output'
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lines without a seed (default: 0)")
    parser.add_argument(
        "--in-flight",
        type=positive,
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
        type=positive,
        metavar="INT",
        help="number of Ray actors with an engine each; needs duetto[ray]",
    )
    parser.add_argument(
        "--ray-options",
        type=json_object,
        default={},
        metavar="JSON",
        help='resources of each Ray actor, such as {"num_gpus": 1}',
    )
    common.model_flags(parser)
    common.report_flags(parser)
    common.sampling_flags(
        parser,
        "for lines that do not set them",
        ("seed", "spaces_between_special_tokens"),
        {"max_tokens": "16; in a chat the model's length"},
    )
    common.engine_flags(parser)
    common.cache_flags(parser)


def check_ray(args: argparse.Namespace) -> None:
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
    from ..engine.startup.origin import Origin
    from ..jobs.workers.remote import WorkerPool

    tokenizer, _ = Origin.of(args.model, args.tokenizer, weights=False).words()
    crew = RayBackend(common.llm_arguments(args, replace(options, use_tqdm_on_load=False)), args.ray_options)
    return WorkerPool(crew, args.ray, tokenizer, options)


def own_choices(args: argparse.Namespace, folder: Path, options: EngineOptions) -> tuple[str, EngineOptions]:
    """Return the dtype that decides the answers, and the options with `cpu_kernels` decided. For a job on Ray
    they are as given, since each actor's machine chooses; answers name the choice."""
    if args.ray:
        return args.dtype, options
    keep_compiled(None if args.compilation_cache == "none" else args.compilation_cache)
    stored = None if options.load_format == "dummy" else folder
    device, config = default_device(), read_config(folder)
    with telling(not args.quiet):
        options = with_kernels(options, device, config, args.dtype)
    return str(compute_dtype(args.dtype, device, config, stored, options.cpu_kernels)), options


def progress_of(args: argparse.Namespace) -> Callable[[], int] | None:
    """Return a counter of the bytes of answers that survive a lost run; None for streams."""
    if "-" in (args.input, args.output):
        return None
    journal = JobFiles(Path(os.path.realpath(args.output))).journal
    return lambda: journal.stat().st_size if journal.exists() else 0


def run(args: argparse.Namespace) -> int:
    common.check_files(args)
    check_ray(args)
    if args.tool_call_parser is not None:
        common.checked(args, lambda: format_named(args.tool_call_parser))
    asked = options = common.engine_options(args)
    if options.speculation.acceptance == "rejection":
        args.usage_error(
            "--speculative-config: acceptance=rejection is not allowed in a batch: "
            "which tokens are drawn depends on what runs beside a line, "
            "so that a resumed job would not write the same answers; leave it out"
        )
    sampling = given(SamplingParams, args, leave_out=("seed",))
    common.checked(args, lambda: SamplingParams.from_dict(sampling))
    folder, options = common.resolve_once(args, options)
    sampling = options.recommended(checked_defaults(folder).sampling) | sampling
    join(asked)
    adapters = common.checked(args, lambda: modules_of(asked.lora_modules))
    options = options.on(memory_limit(default_device()))
    job = BatchOptions(
        in_flight=args.in_flight or 4 * options.seats * (args.ray or 1),
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
    dtype, options = own_choices(args, folder, options)
    if default_device().platform != "cpu":  # answers name how the products of all programs are configured
        options = replace(options, background_compilation=False)
    begin = partial(
        common.start if args.ray is None else start_actors,
        args,
        replace(options, max_prefill_delay=options.patience(awaited=False)),
    )
    if options.node_rank:
        begin()  # which ends with rank 0
    return run_batch(
        begin,
        args.input,
        args.output,
        job,
        fingerprint(folder, tokenizer, dtype, options),
        lambda report: common.finish(report, args),
        args.report,
    )
