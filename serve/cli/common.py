"""What commands share: the flags of a model and its engine, and how a command line becomes an `LLM`."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..host.signals import raise_on_interrupt
from ..host.sockets.secret import key_in
from ..host.streams import tell
from ..options.engine import PROCESSES, EngineOptions
from ..options.flags import add_fields, given
from ..planner.roofline.report import check_path, render, save

if TYPE_CHECKING:
    from ...sampling.params import SamplingParams
    from ..llm.llm import LLM

T = TypeVar("T")


def model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL",
        help="a Hugging Face folder, or an id on the hub such as Qwen/Qwen3-0.6B "
        "(default: the small model that ships)",
    )  # fmt: skip
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="another folder or id to take the tokenizer from"
    )
    parser.add_argument("--tokenizer-revision", help="branch, tag or commit of the tokenizer")
    parser.add_argument(
        "--download-dir", metavar="DIR", help="where models of the hub are kept (default: the hub's cache)"
    )
    parser.add_argument(
        "--compilation-cache", default="auto", metavar="DIR",
        help='where compiled programs are kept (default: in your cache directory); "none" keeps none',
    )  # fmt: skip


def engine_flags(parser: argparse.ArgumentParser, alone: bool = False) -> None:
    """Flags of an engine, `alone` in its process."""
    leave_out = ("seed", *PROCESSES) if alone else ("seed",)
    add_fields(parser, EngineOptions, "engine", leave_out)


def cache_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-cache", metavar="DIR", help="find the prompts that --save-cache has kept there"
    )
    parser.add_argument(
        "--save-cache", metavar="DIR", help="keep the prompts and answers that the cache holds at the end"
    )


def sampling_flags(parser: argparse.ArgumentParser, whose: str, leave_out: Sequence[str]) -> None:
    from ...sampling.params import SamplingParams

    add_fields(parser, SamplingParams, f"sampling, {whose}", leave_out)


def report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", action="store_true", help="say nothing of the start, and show no report at the end"
    )
    parser.add_argument("--report", metavar="FILE", help="write the closing report as JSON")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"),
        help="least level of log lines on standard error; debug has the reason why a request waits",
    )  # fmt: skip
    parser.add_argument(
        "--explain",
        action="store_true",
        help="add to the report what each compiled program did beside its floor",
    )


def checked(args: argparse.Namespace, make: Callable[[], T]) -> T:
    """What `make` makes of flags; a value that is not allowed ends the program as a usage error."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        args.usage_error(str(error))
        raise


def engine_options(args: argparse.Namespace) -> EngineOptions:
    return checked(args, lambda: EngineOptions(**given(EngineOptions, args, leave_out=("seed",))))


def sampling_params(args: argparse.Namespace, defaults: "SamplingParams") -> "SamplingParams":
    """The defaults with what the command line says."""
    return checked(args, lambda: replace(defaults, **given(type(defaults), args)))


def start(args: argparse.Namespace, options: EngineOptions) -> "LLM":
    from ..llm.llm import LLM
    from ..llm.snapshots import check_tiers

    raise_on_interrupt()
    log_from(args.log_level)
    key_in(options.cluster_key_file)  # what is wrong is said before a model is loaded
    check_tiers(options)
    options = replace(options, use_tqdm_on_load=not args.quiet and getattr(args, "progress", True))
    llm = LLM(**llm_arguments(args, options))
    if args.load_cache is not None:
        llm.load_cache(args.load_cache)
    return llm


def log_from(level: str) -> None:
    """Write the library's log lines of a level and above to standard error."""
    if level != "warning":  # which Python does by itself
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log = logging.getLogger("duetto")
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False


def llm_arguments(args: argparse.Namespace, options: EngineOptions) -> dict[str, Any]:
    """What `LLM` is made with."""
    kept = None if args.compilation_cache == "none" else args.compilation_cache
    names = ("model", "dtype", "tokenizer", "revision", "tokenizer_revision", "download_dir")
    return {name: vars(args)[name] for name in names} | {"compilation_cache": kept} | asdict(options)


def resolve_once(args: argparse.Namespace, options: EngineOptions) -> tuple[Path, EngineOptions]:
    """Puts folders in the place of ids, so that all that follows reads the same files; the model's, and
    options without ids."""
    from ..engine.startup.origin import Origin

    names = ("revision", "tokenizer_revision", "download_dir")
    origin = Origin.of(args.model, args.tokenizer, **{name: vars(args)[name] for name in names})
    args.model = str(origin.model)
    args.tokenizer = None if origin.tokenizer == origin.model else str(origin.tokenizer)
    return origin.model, origin.settled(options, download_dir=args.download_dir)


def check_report(args: argparse.Namespace) -> None:
    """Raises ValueError, before anything runs, where --report cannot be written or is no report's place."""
    if args.report:
        check_path(args.report)


def check_cache(args: argparse.Namespace) -> None:
    """Raises ValueError, before anything runs, where --load-cache or --save-cache cannot be what they are
    to be."""
    if args.load_cache is not None or args.save_cache is not None:
        from ..llm.snapshots import check_places

        check_places(args.load_cache, args.save_cache)


def finish(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Shows an engine's report on standard error, and writes it where --report says."""
    if not args.quiet:
        tell(f"\n{render(report)}")
    if args.report:
        save(report, args.report)
