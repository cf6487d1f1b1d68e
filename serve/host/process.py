"""This process: its heap of Python objects, its huge pages, the memory that it returns, and its forks.

By default glibc returns freed blocks above 32 MiB to the system, so that an XLA CPU program with larger
temporaries faults its pages in anew at each call. Other C libraries are left as they are.
"""

import ctypes
import gc
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from .devices import is_started

LONG = 0.05  # seconds of a garbage collection
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 1 << 30  # bytes: smaller blocks, and free memory up to this, stay with the process
MADV_COLLAPSE = 25  # of mman.h
HUGE_PAGE = 1 << 21
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_INHERITED = [False]


def freeze_what_lasts() -> None:
    """Exclude today's objects from garbage collections, and those that outlive a full collection that took
    LONG. JAX keeps every traced program as long as the process, half a million objects for an engine: each
    full collection stops all threads for 0.2 s."""
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


def keep_freed() -> None:
    """Let the process keep the memory that it frees."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def use_huge_pages(arrays: Any) -> int:
    """Move the larger arrays of a tree that lie in this process's memory into huge pages, so that reading
    them takes fewer look-ups of addresses. Return the number of pages; 0 before Linux 6.1, and where the
    system's setting is `never`."""
    if "[never]" in setting_of_huge_pages():
        return 0
    there = (x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array))
    shards = (shard for x in there for shard in x.addressable_shards)
    own = jax.block_until_ready([s.data for s in shards if s.device.platform == "cpu"])
    found = [(x.unsafe_buffer_pointer(), x.nbytes) for x in own if x.nbytes >= HUGE_PAGE // 32]
    pages = {n for start, size in found for n in range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE))}
    with suppress(AttributeError, OSError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = pool.map(lambda n: madvise(n * HUGE_PAGE, HUGE_PAGE, MADV_COLLAPSE) == 0, pages)
            return sum(done)
    return 0


def setting_of_huge_pages() -> str:
    """Return the system's choices, the one in force in brackets; never where there is none."""
    try:
        return HUGE_PAGES.read_text()
    except OSError:
        return "[never]"


def give_back() -> None:
    """Return free memory to the system."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release(error: BaseException | None) -> None:
    """Clear the local variables, arrays too, of the frames of an error and of the errors before it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_inherited() -> bool:
    """Return whether this process was forked after jax had started: jax's threads, and engines', are the
    parent's alone."""
    return _INHERITED[0]


def require_own_threads() -> None:
    """Raise RuntimeError if a program on a device would wait for threads that a fork has not copied."""
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
