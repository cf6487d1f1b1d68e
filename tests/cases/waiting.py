"""Waiting for what another process does."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
