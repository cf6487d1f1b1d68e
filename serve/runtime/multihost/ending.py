"""How a process ends whose group is lost."""

import os
import sys
from contextlib import suppress
from typing import NoReturn

from ...host.streams import tell

LOST = 75  # its exit code: EX_TEMPFAIL of sysexits.h


def end_process(code: int, why: str = "") -> NoReturn:
    """End this process from any thread, with one sentence where there is something to say."""
    if why:
        tell(f"duetto: {why}")
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
