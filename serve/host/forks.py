"""Processes that were forked after jax had started: its threads, and an engine's, are the parent's alone."""

import os

from .devices import is_started

_INHERITED = [False]


def is_inherited() -> bool:
    """Whether jax and all engines of this process are copies of the parent's, without their threads."""
    return _INHERITED[0]


def require_own_threads() -> None:
    """Raise RuntimeError where a program on a device would wait for threads that a fork has not copied."""
    if is_inherited():
        raise RuntimeError(
            "this process was forked after jax had started: an LLM cannot be used here, since its threads "
            "run in the parent alone; start the process by 'spawn' or 'forkserver', or make the LLM after "
            "the fork"
        )


def _notice() -> None:
    _INHERITED[0] = is_started()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_notice)
