"""Ports, for scripts that start several processes."""

import socket


def get_open_port() -> int:
    """Return a port of this machine that no process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
