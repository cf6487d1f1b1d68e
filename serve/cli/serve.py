"""`duetto serve`: a server of OpenAI's API."""

import argparse
from dataclasses import replace

from ..engine.lora.registry import modules_of
from ..engine.startup.folder import checked_defaults
from ..options.engine import EngineOptions
from ..options.flags import add_fields, given
from ..options.server import ServerOptions
from ..text.tools.tool_parsers import format_named
from .common import (
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
    start,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="MODEL", help="the same as --model")
    add_fields(parser, ServerOptions, "server")
    model_flags(parser)
    report_flags(parser)
    engine_flags(parser, alone=True)
    cache_flags(parser)


def check_names(options: ServerOptions, engine: EngineOptions) -> None:
    """Raises ValueError for an adapter that nobody could name."""
    for request in modules_of(engine.lora_modules):
        if request.lora_name in (options.served_model_name or ()):
            raise ValueError(f"lora_modules: {request.lora_name!r} is the model's own name")
    if options.runtime_lora_updating and not engine.enable_lora:
        raise ValueError("runtime_lora_updating is not allowed without enable_lora")


def run(args: argparse.Namespace) -> int:
    from ..server.http.main import front, served

    options = checked(args, lambda: ServerOptions(**given(ServerOptions, args)))
    if options.tool_call_parser is not None:
        checked(args, lambda: format_named(args.tool_call_parser))
    if args.path is not None and args.model is not None:
        args.usage_error(f"MODEL {args.path} and --model {args.model} are two models")
    args.model = args.path or args.model
    check_report(args)
    check_cache(args)
    names = options.served_model_name or [str(args.model or "demo")]
    options = replace(options, served_model_name=names)
    before = front(options)
    with before.own:
        folder, engine = resolve_once(args, engine_options(args))
        defaults = engine.recommended(checked_defaults(folder).sampling)
        checked(args, lambda: check_names(options, engine))
        with start(args, engine) as llm:
            code = served(llm, options, defaults, before)
            if args.save_cache is not None:
                llm.resume_generation()  # a pause ends with the requests that it was for
                llm.save_cache(args.save_cache)
            finish(llm.report(args.explain), args)
    return code
