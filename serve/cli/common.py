"""Flags of a model and its engine, which commands share, and the `LLM` that they start."""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..host.signals import restore_interrupt_handler
from ..host.sockets.secret import read_key
from ..host.streams import print_stderr
from ..options.engine import PROCESS_OPTIONS, EngineOptions
from ..options.flags import add_field_flags, read_given_fields
from ..planner.roofline.report import check_report_path, render_engine_report, save_report

if TYPE_CHECKING:
    from ...sampling.params import SamplingParams
    from ..llm.llm import LLM

T = TypeVar("T")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL",
        help="a Hugging Face folder, or an id on the Hugging Face hub such as Qwen/Qwen3-0.6B "
        "(default: the small model that is included)",
    )  # fmt: skip
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="data type of the weights: auto (default), float32, bfloat16 or float16",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="folder or id of another model's tokenizer")
    parser.add_argument("--tokenizer-revision", help="branch, tag or commit of the tokenizer")
    parser.add_argument(
        "--download-dir", metavar="DIR", help="folder for downloaded models (default: the hub's cache)"
    )
    parser.add_argument(
        "--compilation-cache", default="auto", metavar="DIR",
        help='folder for compiled programs (default: in your cache directory); "none" disables it',
    )  # fmt: skip


def add_engine_flags(parser: argparse.ArgumentParser, is_alone: bool = False) -> None:
    """Add the flags of an engine. With `is_alone`, leave out the flags of several processes."""
    leave_out = ("seed", *PROCESS_OPTIONS) if is_alone else ("seed",)
    add_field_flags(parser, EngineOptions, "engine", leave_out)


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-cache", metavar="DIR", help="load the KV cache that --save-cache has saved there"
    )
    parser.add_argument("--save-cache", metavar="DIR", help="save the KV cache at the end")


def add_sampling_flags(
    parser: argparse.ArgumentParser, purpose: str, leave_out: Sequence[str], defaults: Mapping[str, Any]
) -> None:
    from ...sampling.params import SamplingParams

    add_field_flags(parser, SamplingParams, f"sampling, {purpose}", leave_out, defaults)


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", action="store_true", help="no progress of the start and of a job, and no report at the end"
    )
    parser.add_argument("--report", metavar="FILE", help="write the final report as JSON")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"),
        help="minimum level of log lines on standard error; debug adds why a request waits",
    )  # fmt: skip
    parser.add_argument(
        "--explain",
        action="store_true",
        help="add each compiled program's time and its roofline floor to the report",
    )


def exit_on_usage_error(args: argparse.Namespace, make: Callable[[], T]) -> T:
    """Return `make()`. On a ValueError or TypeError end the program with a usage error."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        args.usage_error(str(error))
        raise


def parse_engine_options(args: argparse.Namespace) -> EngineOptions:
    return exit_on_usage_error(
        args, lambda: EngineOptions(**read_given_fields(EngineOptions, args, leave_out=("seed",)))
    )


def sampling_params_from_args(args: argparse.Namespace, defaults: "SamplingParams") -> "SamplingParams":
    """Return the defaults, changed by the command line."""
    return exit_on_usage_error(args, lambda: replace(defaults, **read_given_fields(type(defaults), args)))


def start_llm(args: argparse.Namespace, options: EngineOptions) -> "LLM":
    """Start an `LLM` from the command line, and load a saved KV cache into it."""
    from ..llm.llm import LLM
    from ..llm.snapshots import check_host_tiers

    restore_interrupt_handler()
    set_log_level(args.log_level)
    read_key(options.cluster_key_file)  # fails before a model is loaded
    check_host_tiers(options)
    options = replace(options, use_tqdm_on_load=not args.quiet and getattr(args, "progress", True))
    llm = LLM(**llm_arguments(args, options))
    if args.load_cache is not None:
        llm.load_cache(args.load_cache)
    return llm


def set_log_level(level: str) -> None:
    """Write the library's log lines of a level and above to standard error."""
    if level != "warning":  # Python logs warnings without a handler
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log = logging.getLogger("duetto")
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False


def llm_arguments(args: argparse.Namespace, options: EngineOptions) -> dict[str, Any]:
    """Return the keywords of `LLM`."""
    cache_folder = None if args.compilation_cache == "none" else args.compilation_cache
    names = ("model", "dtype", "tokenizer", "revision", "tokenizer_revision", "download_dir")
    return {name: vars(args)[name] for name in names} | {"compilation_cache": cache_folder} | asdict(options)


def resolve_hub_ids(args: argparse.Namespace, options: EngineOptions) -> tuple[Path, EngineOptions]:
    """Replace hub ids by folders, so that all later reads see the same files.

    Returns the model's folder, and the options without ids.
    """
    from ..engine.startup.model_source import ModelSource

    names = ("revision", "tokenizer_revision", "download_dir")
    origin = ModelSource.resolve_names(
        args.model, args.tokenizer, **{name: vars(args)[name] for name in names}
    )
    args.model = str(origin.model_folder)
    args.tokenizer = None if origin.tokenizer_folder == origin.model_folder else str(origin.tokenizer_folder)
    return origin.model_folder, origin.resolve_options(options, download_dir=args.download_dir)


def check_output_files(args: argparse.Namespace) -> None:
    """Check --report, --load-cache and --save-cache before anything runs. Raises ValueError for a file that
    cannot be written, or is of another kind."""
    if args.report:
        check_report_path(args.report)
    if args.load_cache is not None or args.save_cache is not None:
        from ..llm.snapshots import check_cache_folders

        check_cache_folders(args.load_cache, args.save_cache)


def show_and_save_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Show an engine's report on standard error, and save it to --report."""
    if not args.quiet:
        print_stderr(f"\n{render_engine_report(report)}")
    if args.report:
        save_report(report, args.report)
