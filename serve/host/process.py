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

from .devices import is_jax_initialized

LONG_COLLECTION_SECONDS = 0.05  # seconds of a garbage collection that is too long
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES = 1 << 30  # bytes: smaller blocks, and free memory up to this, stay with the process
MADV_COLLAPSE = 25  # of mman.h
HUGE_PAGE_BYTES = 1 << 21
HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_IS_FORKED = [False]


def freeze_lasting_objects() -> None:
    """Exclude lasting objects from garbage collections: today's, and those alive after a collection
    longer than LONG_COLLECTION_SECONDS.

    JAX keeps every traced program as long as the process, half a million objects for an engine. Each full
    collection stops all threads for 0.2 s.
    """
    begin = 0.0

    def on_collection(phase: str, info: dict[str, Any]) -> None:
        nonlocal begin
        if phase == "start":
            begin = time.perf_counter()
        elif info["generation"] == 2 and time.perf_counter() - begin > LONG_COLLECTION_SECONDS:
            gc.freeze()

    gc.collect()
    gc.freeze()
    gc.callbacks.append(on_collection)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for this process, up to KEPT_BYTES."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def use_huge_pages(arrays: Any) -> int:
    """Move the larger arrays of a tree in this process's memory into huge pages; returns the number of pages.

    Reading them takes fewer look-ups of addresses. Returns 0 before Linux 6.1, and if the system's setting is
    `never`.
    """
    if "[never]" in read_huge_page_setting():
        return 0
    jax_arrays = (x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array))
    shards = (shard for x in jax_arrays for shard in x.addressable_shards)
    buffers = jax.block_until_ready([s.data for s in shards if s.device.platform == "cpu"])
    regions = [(x.unsafe_buffer_pointer(), x.nbytes) for x in buffers if x.nbytes >= HUGE_PAGE_BYTES // 32]
    pages = {
        n
        for start, size in regions
        for n in range(start // HUGE_PAGE_BYTES, -(-(start + size) // HUGE_PAGE_BYTES))
    }
    with suppress(AttributeError, OSError, TypeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        with ThreadPoolExecutor(os.cpu_count(), "duetto-huge-pages") as pool:
            done = pool.map(
                lambda n: madvise(n * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, MADV_COLLAPSE) == 0, pages
            )
            return sum(done)
    return 0


def read_huge_page_setting() -> str:
    """Return the system's choices for huge pages, the one in force in brackets; "[never]" without any."""
    try:
        return HUGE_PAGES_FILE.read_text()
    except OSError:
        return "[never]"


def trim_heap() -> None:
    """Return the heap's free memory to the system."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the frames of an error and of the errors before it, to release arrays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_forked() -> bool:
    """Return True if this process was forked after jax had started. The threads of jax and of engines run in
    the parent alone."""
    return _IS_FORKED[0]


def require_not_forked() -> None:
    """Raise RuntimeError in a forked process: a program would wait for threads that the fork has not
    copied."""
    if is_forked():
        raise RuntimeError(
            "this process was forked after jax had started: an LLM cannot be used here, since its threads "
            "run in the parent alone; start the process by 'spawn' or 'forkserver', or make the LLM after "
            "the fork"
        )


def _record_fork() -> None:
    _IS_FORKED[0] = is_jax_initialized()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_record_fork)
