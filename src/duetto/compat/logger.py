"""`init_logger`, for scripts for vLLM that write to a log."""

from logging import Logger, getLogger


def init_logger(name: str) -> Logger:
    """Return Python's logger of this name."""
    return getLogger(name)
