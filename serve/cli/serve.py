"""`duetto serve`: an HTTP server of OpenAI's API."""

import argparse
from dataclasses import replace

from ..engine.startup.folder import checked_defaults
from ..options.engine import EngineOptions
from ..options.flags import add_fields, given
from ..options.lora import modules_of
from ..options.server import ServerOptions
from ..text.tools.formats import format_named
from . import common


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="MODEL", help="the same as --model")
    add_fields(parser, ServerOptions, "server")
    common.model_flags(parser)
    common.report_flags(parser)
    common.engine_flags(parser, alone=True)
    common.cache_flags(parser)


def check_names(options: ServerOptions, engine: EngineOptions) -> None:
    """Raise ValueError for an adapter with the model's name, and for a flag that needs enable_lora."""
    for request in modules_of(engine.lora_modules):
        if request.lora_name in (options.served_model_name or ()):
            raise ValueError(f"lora_modules: {request.lora_name!r} is the model's own name")
    if options.runtime_lora_updating and not engine.enable_lora:
        raise ValueError("runtime_lora_updating is not allowed without enable_lora")


def run(args: argparse.Namespace) -> int:
    from ..server.http.main import front, served

    options = common.checked(args, lambda: ServerOptions(**given(ServerOptions, args)))
    if options.tool_call_parser is not None:
        common.checked(args, lambda: format_named(args.tool_call_parser))
    if args.path is not None and args.model is not None:
        args.usage_error(f"MODEL {args.path} and --model {args.model} are two models")
    args.model = args.path or args.model
    common.check_files(args)
    names = options.served_model_name or [str(args.model or "demo")]
    options = replace(options, served_model_name=names)
    before = front(options)
    with before.own:
        folder, engine = common.resolve_once(args, common.engine_options(args))
        defaults = engine.recommended(checked_defaults(folder).sampling)
        common.checked(args, lambda: check_names(options, engine))
        with common.start(args, engine) as llm:
            code = served(llm, options, defaults, before)
            if args.save_cache is not None:
                llm.resume_generation()  # a pause ends with its requests
                llm.save_cache(args.save_cache)
            common.finish(llm.report(args.explain), args)
    return code
