"""Memory that is given back: arrays that an error's frames hold, and what glibc's allocator keeps under
XLA's CPU programs until an engine is closed.

By default blocks above 32 MiB go back to the system when they are freed, so that a program with larger
temporaries faults its pages in anew at each call. On other C libraries nothing is changed.
"""

import ctypes
import traceback

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 1 << 30  # bytes: smaller blocks, and so much free memory, stay with the process


def keep_freed() -> None:
    """Let the process keep the memory that it frees."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEPT)
    mallopt(M_TRIM_THRESHOLD, KEPT)


def release(error: BaseException | None) -> None:
    """Forget what the functions held that an error has ended, and the errors before it: arrays too."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def give_back() -> None:
    """Return free memory to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
