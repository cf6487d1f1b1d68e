"""`duetto route`: a router, one address for several servers."""

import argparse

from ..options.flags import add_fields, given
from ..options.router import RouterOptions
from ..options.server import ServerOptions
from .common import checked

# Options of a server without a router.
LEFT_OUT = (
    "served_model_name", "max_stream_backlog", "keepalive_interval", "profile_dir", "otlp_traces_endpoint",
    "kv_events_config", "kv_events_endpoint",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_fields(parser, RouterOptions, "router")
    add_fields(parser, ServerOptions, "server", LEFT_OUT)


def run(args: argparse.Namespace) -> int:
    from ..server.http.guards import keys_in
    from ..server.http.lifecycle import check_certificates, reserved
    from ..server.router.main import naming, routed

    options = checked(args, lambda: RouterOptions(**given(RouterOptions, args)))
    server = checked(args, lambda: ServerOptions(**given(ServerOptions, args, LEFT_OUT)))
    keys = keys_in(server.api_key_file) if server.api_key_file else []
    check_certificates(server)
    naming(options)  # fails before anything is served
    with reserved(server) as own:
        return routed(options, server, own, keys)
