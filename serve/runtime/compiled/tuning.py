"""Configuration that XLA chose for a device. Autotuning measures candidates, so another machine of the same
kind, or another start, may choose other products, whose sums have other bits."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

BACKEND = "backend_config="


def tuning(programs: Iterable[Any]) -> str:
    """Return a hash of the settings that backends noted in compiled programs, whatever the names of these."""
    found = hashlib.sha256()
    for text in sorted("\n".join(sorted(settings(program.as_text() or ""))) for program in programs):
        found.update(text.encode())
    return found.hexdigest()[:16]


def settings(text: str) -> Iterable[str]:
    """Yield the settings of each instruction of a module that has some."""
    return (json.dumps(found, sort_keys=True) for line in text.splitlines() if (found := noted(line)))


def noted(instruction: str) -> dict[str, Any]:
    """Return the settings that a backend noted in an instruction, without a kernel's own code."""
    at = instruction.find(BACKEND + "{")
    if at < 0:
        return {}
    try:
        return json.JSONDecoder().raw_decode(instruction, at + len(BACKEND))[0]
    except ValueError:  # a kernel's code is no JSON
        return {}
