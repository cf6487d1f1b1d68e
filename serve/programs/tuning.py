"""How XLA configured what a device runs. Autotuning measures candidates, so another machine of the same kind,
or another start, may choose other products, whose sums have other bits."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

BACKEND = "backend_config="


def tuning(programs: Iterable[Any]) -> str:
    """A hash of the settings that backends noted in compiled programs, whatever these were named."""
    found = hashlib.sha256()
    for text in sorted("\n".join(sorted(settings(program.as_text() or ""))) for program in programs):
        found.update(text.encode())
    return found.hexdigest()[:16]


def settings(text: str) -> Iterable[str]:
    """The settings of each instruction of a module that has some."""
    decoder = json.JSONDecoder()
    for line in text.splitlines():
        at = line.find(BACKEND + "{")
        if at >= 0:
            try:
                _, end = decoder.raw_decode(line, at + len(BACKEND))
            except ValueError:  # a kernel's own code
                continue
            yield line[at + len(BACKEND) : end]
