"""`duetto route`: a router, one address for several servers."""

import argparse

from ..options.flags import add_field_flags, read_given_fields
from ..options.router import RouterOptions
from ..options.server import ServerOptions
from .common import exit_on_usage_error

# Options of a server without a router.
UNROUTED_OPTIONS = (
    "served_model_name", "max_stream_backlog", "keepalive_interval", "profile_dir", "otlp_traces_endpoint",
    "kv_events_config", "kv_events_endpoint",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_field_flags(parser, RouterOptions, "router")
    add_field_flags(parser, ServerOptions, "server", UNROUTED_OPTIONS)


def run(args: argparse.Namespace) -> int:
    from ..server.http.guards import read_api_keys
    from ..server.http.lifecycle import bind_socket, check_certificates
    from ..server.router.main import make_page_hasher, run_router

    options = exit_on_usage_error(args, lambda: RouterOptions(**read_given_fields(RouterOptions, args)))
    server = exit_on_usage_error(
        args, lambda: ServerOptions(**read_given_fields(ServerOptions, args, UNROUTED_OPTIONS))
    )
    keys = read_api_keys(server.api_key_file) if server.api_key_file else []
    check_certificates(server)
    make_page_hasher(options)  # fails before anything is served
    with bind_socket(server) as listener:
        return run_router(options, server, listener, keys)
