"""`duetto verify`: an audit log proved by running its requests again."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ..host.streams import tell
from ..jobs.verify.claims import Claims, Start
from ..jobs.verify.verdict import OPEN, VerificationReport, printable
from ..options.flags import positive
from ..options.keywords import engine_options
from .common import model_flags

FILES = ("lora_modules",)  # options of a log that name files, which the command line names instead


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="what --audit-log has written")
    model_flags(parser)
    parser.add_argument(
        "--sample", type=positive, metavar="INT", help="so many requests, drawn at random (default: all)"
    )
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=FOLDER",
        help="adapters that requests of the log have used",
    )
    parser.add_argument("--head", metavar="HASH", help="a line's hash that is known from elsewhere")
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="run what other versions or devices have made too: equal bits are proved, others are not",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quiet", action="store_true", help="say nothing of the start")


def run(args: argparse.Namespace) -> int:
    """0 where all is proved, 1 where something was altered, 2 where something cannot be told here."""
    try:
        claims = Claims.of(Path(args.log))
    except (ValueError, OSError) as error:
        tell(f"duetto verify: {error}")
        return OPEN
    if args.head is not None and args.head not in claims.hashes:
        claims.broken[0] = f"no line has the hash {args.head}: the end was taken off, or something changed"
    try:
        proof = proved(args, claims)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        proof = VerificationReport([], claims)
        tell(f"duetto verify: no engine can be started as in the log: {printable(str(error))}")
    if args.json:
        print(msgspec.json.encode(proof.record()).decode())
    else:
        print("\n".join(proof.lines()))
    return proof.code


def proved(args: argparse.Namespace, claims: Claims) -> VerificationReport:
    """Starts an engine as the log's latest start says. Raises ValueError where it cannot be."""
    from ..jobs.verify.replay import Prover
    from ..llm.llm import LLM

    start = claims.last_start
    if start is None:
        raise ValueError("the line of its start is missing")
    with LLM(**arguments(args, start)) as llm:
        return Prover(llm).prove(claims, args.sample, args.anyway)


def arguments(args: argparse.Namespace, start: Start) -> dict[str, Any]:
    """What the engine is made with: the log's options, where flags do not say otherwise. What names files or
    is found over the network comes from flags alone."""
    names = ("model", "tokenizer", "revision", "tokenizer_revision", "download_dir")
    kept = None if args.compilation_cache == "none" else args.compilation_cache
    logged = {name: value for name, value in start.options.items() if name not in FILES}
    options = engine_options(logged | {"use_tqdm_on_load": not args.quiet})
    if args.lora_modules:
        options = replace(options, enable_lora=True, lora_modules=args.lora_modules)
    own = {name: vars(options)[name] for name in [*logged, *FILES, "use_tqdm_on_load"]}
    check_model(args.model, start.model)
    return {
        "dtype": start.facts.get("dtype", "auto") if args.dtype == "auto" else args.dtype,
        "compilation_cache": kept,
        **{name: vars(args)[name] for name in names},
        **own,
    }


def check_model(given: str | None, logged: str | None) -> None:
    """Raises ValueError where --model is missing, and the log is not of the model that ships."""
    from ..engine.startup.folder import DEMO

    if given is None and logged is None:
        raise ValueError("the log names no folder for its model: give it with --model")
    if given is None and Path(str(logged)).name != DEMO.name:
        raise ValueError(
            f"the log is of the model {logged!r}, and what a log names is not opened: give it with --model, "
            "if you trust it"
        )
