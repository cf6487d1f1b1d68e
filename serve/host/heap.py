"""The process's heap of Python objects."""

import gc
import time
from typing import Any

LONG = 0.05  # seconds


def freeze_what_lasts() -> None:
    """Let garbage collections pass over what is there now, and over what has outlived one of the whole heap
    that took LONG. JAX keeps every traced program as long as the process, half a million objects for an
    engine: each look through them holds up all threads for 0.2 s."""
    begin = 0.0

    def on_collection(phase: str, info: dict[str, Any]) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        elif info["generation"] == 2 and time.perf_counter() - begin > LONG:
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(on_collection)
