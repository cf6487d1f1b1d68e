"""`duetto verify`: prove an audit log by running its requests again."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ..host.streams import print_stderr
from ..jobs.verify.claims import Claims, Start
from ..jobs.verify.verdict import UNPROVED_CODE, VerificationReport, escape_controls
from ..options.flags import parse_positive
from ..options.keywords import options_from_keywords
from .common import add_model_flags

FILE_OPTIONS = ("lora_modules",)  # options that name files: taken from the command line, not from the log


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="audit log, written by --audit-log")
    add_model_flags(parser)
    parser.add_argument(
        "--sample",
        type=parse_positive,
        metavar="INT",
        help="number of requests, drawn at random (default: all)",
    )
    parser.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=FOLDER", help="adapters that requests of the log used"
    )
    parser.add_argument(
        "--logits-processors",
        nargs="+",
        default=(),
        metavar="MODULE:FUNCTION",
        help="logits processors that the log's engine had",
    )
    parser.add_argument(
        "--head",
        metavar="HASH",
        help="hash of a line, known from another source: fail if the log does not have it",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="run requests of other versions or devices too: only equal bits are a proof",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress of the start")


def run(args: argparse.Namespace) -> int:
    """Return 0 if all requests are proved, 1 if one was altered, 2 if one cannot be checked here."""
    try:
        claims = Claims.from_log(Path(args.log))
    except (ValueError, OSError) as error:
        print_stderr(f"duetto verify: {error}")
        return UNPROVED_CODE
    if args.head is not None and args.head not in claims.hashes:
        claims.broken[0] = f"no line has the hash {args.head}: the end was taken off, or something changed"
    try:
        proof = verify_log(args, claims)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        proof = VerificationReport([], claims)
        print_stderr(f"duetto verify: no engine can be started as in the log: {escape_controls(str(error))}")
    if args.json:
        print(msgspec.json.encode(proof.to_record()).decode())
    else:
        print("\n".join(proof.format_lines()))
    return proof.exit_code


def verify_log(args: argparse.Namespace, claims: Claims) -> VerificationReport:
    """Verify with an engine that has the options of the log's latest start. Raises ValueError without one."""
    from ..jobs.verify.replay import LogVerifier
    from ..llm.llm import LLM

    start = claims.last_start
    if start is None:
        raise ValueError("the line of its start is missing")
    with LLM(**replay_arguments(args, start)) as llm:
        return LogVerifier(llm).verify_claims(claims, args.sample, args.anyway)


def replay_arguments(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Return the keywords of `LLM`: the log's options, changed by flags. Files and hub ids come from flags
    alone."""
    names = ("model", "tokenizer", "revision", "tokenizer_revision", "download_dir")
    cache_folder = None if args.compilation_cache == "none" else args.compilation_cache
    logged = {name: value for name, value in start.options.items() if name not in FILE_OPTIONS}
    options = options_from_keywords(logged | {"use_tqdm_on_load": not args.quiet})
    if args.lora_modules:
        options = replace(options, enable_lora=True, lora_modules=args.lora_modules)
    logged_options = {name: vars(options)[name] for name in [*logged, *FILE_OPTIONS, "use_tqdm_on_load"]}
    require_model(args.model, start.model)
    return {
        "dtype": start.facts.get("dtype", "auto") if args.dtype == "auto" else args.dtype,
        "compilation_cache": cache_folder,
        **{name: vars(args)[name] for name in (*names, "logits_processors")},
        **logged_options,
    }


def require_model(model: str | None, logged_model: str | None) -> None:
    """Raise ValueError if --model is missing, unless the log is of the included model."""
    from ..engine.startup.model_folder import DEMO_FOLDER

    if model is None and logged_model is None:
        raise ValueError("the log names no folder for its model: give it with --model")
    if model is None and Path(str(logged_model)).name != DEMO_FOLDER.name:
        raise ValueError(
            f"the log is of the model {logged_model!r}, and what a log names is not opened: give it with "
            "--model, if you trust it"
        )
