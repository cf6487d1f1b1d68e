"""`duetto batch`: a file of prompts answered; a killed job goes on where it stopped."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.huggingface import read_config
from ...sampling.params import SamplingParams
from ..engine.lora.registry import modules_of
from ..engine.startup.dtype import compute_dtype
from ..engine.startup.folder import checked_defaults
from ..host.devices import default_device, memory_limit
from ..jobs.batch.fingerprint import fingerprint
from ..jobs.batch.job import BatchOptions
from ..jobs.batch.run import JobFiles, run_batch
from ..options.engine import EngineOptions
from ..options.flags import given, json_object, positive
from ..runtime.compiled.jaxcache import keep_compiled
from ..runtime.multihost.rendezvous import join
from ..text.tools.tool_parsers import format_named
from .common import (
    cache_flags,
    check_cache,
    check_report,
    checked,
    engine_flags,
    engine_options,
    finish,
    llm_arguments,
    model_flags,
    report_flags,
    resolve_once,
    sampling_flags,
    start,
)

if TYPE_CHECKING:
    from ..jobs.workers.remote import WorkerPool


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help='JSON lines in OpenAI\'s batch format or plain; "-" is standard input')
    parser.add_argument(
        "output", help='where the answers go, in the order of the input; "-" is standard output'
    )
    parser.add_argument("--seed", type=int, default=0, help="seeds lines that bring no seed (default: 0)")
    parser.add_argument(
        "--in-flight", type=positive, metavar="INT", help="lines in the engine (default: 4 max-num-seqs)"
    )
    parser.add_argument(
        "--model-name",
        default="duetto",
        help="the model's name in answers to lines that name none (default: duetto)",
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="STR",
        help="notation of the model's calls of tools, as hermes (default: that of its chat template)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say what the start is doing, and show a bar",
    )
    parser.add_argument(
        "--ray", type=positive, metavar="INT", help="engines in so many actors of Ray; needs duetto[ray]"
    )
    parser.add_argument(
        "--ray-options",
        type=json_object,
        default={},
        metavar="JSON",
        help='what Ray reserves for each actor, as {"num_gpus": 1}',
    )
    model_flags(parser)
    report_flags(parser)
    sampling_flags(parser, "for lines that do not say otherwise", ("seed", "spaces_between_special_tokens"))
    engine_flags(parser)
    cache_flags(parser)


def check_ray(args: argparse.Namespace) -> None:
    """What actors cannot do ends the program as a usage error."""
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
    """Engines in actors of Ray's as one."""
    from ...ray import RayBackend
    from ..engine.startup.origin import Origin
    from ..jobs.workers.remote import WorkerPool

    tokenizer, _ = Origin.of(args.model, args.tokenizer, weights=False).words()
    crew = RayBackend(llm_arguments(args, replace(options, use_tqdm_on_load=False)), args.ray_options)
    return WorkerPool(crew, args.ray, tokenizer, options)


def own_dtype(args: argparse.Namespace, folder: Path, options: EngineOptions) -> str:
    """The dtype that the answers follow from. Of a job on Ray the one given: each actor's machine chooses,
    and answers name what it has chosen."""
    if args.ray:
        return args.dtype
    keep_compiled(None if args.compilation_cache == "none" else args.compilation_cache)
    stored = None if options.load_format == "dummy" else folder
    return str(compute_dtype(args.dtype, default_device(), read_config(folder), stored))


def progress_of(args: argparse.Namespace) -> Callable[[], int] | None:
    """What counts bytes of answers that outlive a lost run; None for streams."""
    if "-" in (args.input, args.output):
        return None
    journal = JobFiles(Path(os.path.realpath(args.output))).journal
    return lambda: journal.stat().st_size if journal.exists() else 0


def run(args: argparse.Namespace) -> int:
    check_report(args)
    check_cache(args)
    check_ray(args)
    if args.tool_call_parser is not None:
        checked(args, lambda: format_named(args.tool_call_parser))
    asked = options = engine_options(args)
    if options.speculation.acceptance == "rejection":
        args.usage_error(
            "--speculative-config: acceptance=rejection is not allowed in a batch: "
            "which tokens are drawn depends on what runs beside a line, "
            "so that a resumed job would not write the same answers; leave it out"
        )
    sampling = given(SamplingParams, args, leave_out=("seed",))
    checked(args, lambda: SamplingParams.from_dict(sampling))
    folder, options = resolve_once(args, options)
    sampling = options.recommended(checked_defaults(folder).sampling) | sampling
    join(asked)
    adapters = checked(args, lambda: modules_of(asked.lora_modules))
    options = options.on(memory_limit(default_device()))
    job = BatchOptions(
        in_flight=args.in_flight or 4 * options.seats * (args.ray or 1),
        seed=args.seed,
        sampling=sampling,
        model_name=args.model_name,
        progress=args.progress,
        explain=args.explain,
        save_cache=args.save_cache,
        adapters={request.lora_name: request for request in adapters},
        tool_call_parser=args.tool_call_parser,
    )
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    if default_device().platform != "cpu":  # answers name how the products of all programs are configured
        options = replace(options, serve_while_compiling=False)
    begin = partial(
        start if args.ray is None else start_actors,
        args,
        replace(options, prompt_hold=options.patience(awaited=False)),
    )
    if options.node_rank:
        begin()  # which ends with rank 0
    return run_batch(
        begin,
        args.input,
        args.output,
        job,
        fingerprint(folder, tokenizer, own_dtype(args, folder, options), options),
        lambda report: finish(report, args),
        args.report,
    )
