"""Seconds of calls, each until what it returns is computed."""

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds(call: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of `times` calls, one after the other."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return found
