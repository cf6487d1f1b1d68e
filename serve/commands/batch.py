"""`duetto batch`: a file of prompts answered; a killed job goes on where it stopped."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...sampling.params import SamplingParams
from ..batch.fingerprint import fingerprint
from ..batch.job import BatchOptions
from ..batch.run import Place, run_batch
from ..host.devices import default_device, memory_limit
from ..loading.folder import checked_defaults
from ..options.flags import given, positive
from ..processes.meeting import join
from .command import (
    cache_flags,
    check_cache,
    check_report,
    checked,
    engine_flags,
    engine_options,
    finish,
    model_flags,
    report_flags,
    resolve_once,
    sampling_flags,
    start,
)


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
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say what the start is doing, and show a bar",
    )
    model_flags(parser)
    report_flags(parser)
    sampling_flags(parser, "for lines that do not say otherwise", ("seed", "spaces_between_special_tokens"))
    engine_flags(parser)
    cache_flags(parser)


def progress_of(args: argparse.Namespace) -> Callable[[], int] | None:
    """What counts bytes of answers that outlive a lost run; None for streams."""
    if "-" in (args.input, args.output):
        return None
    journal = Place(Path(os.path.realpath(args.output))).journal
    return lambda: journal.stat().st_size if journal.exists() else 0


def run(args: argparse.Namespace) -> int:
    check_report(args)
    check_cache(args)
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
    options = options.on(memory_limit(default_device()))
    job = BatchOptions(
        in_flight=args.in_flight or 4 * options.seats,
        seed=args.seed,
        sampling=sampling,
        model_name=args.model_name,
        progress=args.progress,
        explain=args.explain,
        save_cache=args.save_cache,
    )
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    if default_device().platform != "cpu":  # answers name how the products of all programs are configured
        options = replace(options, serve_while_compiling=False)
    begin = partial(start, args, replace(options, prompt_hold=options.patience(awaited=False)))
    if options.node_rank:
        begin()  # which ends with rank 0
    return run_batch(
        begin,
        args.input,
        args.output,
        job,
        fingerprint(folder, tokenizer, args.dtype, options),
        lambda report: finish(report, args),
        args.report,
    )
