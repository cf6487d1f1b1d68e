"""`init_logger` and `get_open_port`, for scripts for vLLM that write to a log or start several processes."""

import socket
from logging import Logger, getLogger


def init_logger(name: str) -> Logger:
    """Return Python's logger of this name."""
    return getLogger(name)


def get_open_port() -> int:
    """Return a port of this machine that no process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
