"""`duetto serve`: an HTTP server of OpenAI's API."""

import argparse
from dataclasses import replace

from ..engine.startup.model_folder import read_generation_defaults
from ..options.engine import EngineOptions
from ..options.flags import add_field_flags, read_given_fields
from ..options.lora import parse_lora_modules
from ..options.server import ServerOptions
from ..text.tools.formats import find_tool_format
from . import common


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", metavar="MODEL", help="the same as --model")
    add_field_flags(parser, ServerOptions, "server")
    common.add_model_flags(parser)
    common.add_report_flags(parser)
    common.add_engine_flags(parser, is_alone=True)
    common.add_cache_flags(parser)


def check_adapter_names(options: ServerOptions, engine_options: EngineOptions) -> None:
    """Raise ValueError for an adapter with the model's name, and for a flag that needs enable_lora."""
    for request in parse_lora_modules(engine_options.lora_modules):
        if request.lora_name in (options.served_model_name or ()):
            raise ValueError(f"lora_modules: {request.lora_name!r} is the model's own name")
    if options.runtime_lora_updating and not engine_options.enable_lora:
        raise ValueError("runtime_lora_updating is not allowed without enable_lora")


def run(args: argparse.Namespace) -> int:
    from ..server.http.main import acquire_resources, run_server

    options = common.exit_on_usage_error(
        args, lambda: ServerOptions(**read_given_fields(ServerOptions, args))
    )
    if options.tool_call_parser is not None:
        common.exit_on_usage_error(args, lambda: find_tool_format(args.tool_call_parser))
    if args.path is not None and args.model is not None:
        args.usage_error(f"MODEL {args.path} and --model {args.model} are two models")
    args.model = args.path or args.model
    common.check_output_files(args)
    names = options.served_model_name or [str(args.model or "demo")]
    options = replace(options, served_model_name=names)
    resources = acquire_resources(options)
    with resources.sock:
        folder, engine = common.resolve_hub_ids(args, common.parse_engine_options(args))
        defaults = engine.default_sampling(read_generation_defaults(folder).sampling)
        common.exit_on_usage_error(args, lambda: check_adapter_names(options, engine))
        with common.start_llm(args, engine) as llm:
            code = run_server(llm, options, defaults, resources)
            if args.save_cache is not None:
                llm.resume_generation()  # a pause ends with its requests
                llm.save_cache(args.save_cache)
            common.show_and_save_report(llm.report(args.explain), args)
    return code
