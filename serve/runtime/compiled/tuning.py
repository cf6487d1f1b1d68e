"""Configuration of products that XLA chose for a device. Autotuning measures candidates: another machine of
the same kind, or another start, may choose other products, whose sums have other bits."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

BACKEND_CONFIG = "backend_config="


def tuning_hash(programs: Iterable[Any]) -> str:
    """Return a hash of the settings that XLA's backends wrote into compiled programs. The programs' order
    does not matter."""
    hasher = hashlib.sha256()
    for text in sorted("\n".join(sorted(backend_settings(program.as_text() or ""))) for program in programs):
        hasher.update(text.encode())
    return hasher.hexdigest()[:16]


def backend_settings(text: str) -> Iterable[str]:
    """Yield the settings of each instruction of a module (HLO text) that has settings."""
    return (
        json.dumps(config, sort_keys=True)
        for line in text.splitlines()
        if (config := parse_backend_config(line))
    )


def parse_backend_config(instruction: str) -> dict[str, Any]:
    """Return the settings that a backend wrote into an instruction; empty if there are none, or a kernel's
    code."""
    start = instruction.find(BACKEND_CONFIG + "{")
    if start < 0:
        return {}
    try:
        return json.JSONDecoder().raw_decode(instruction, start + len(BACKEND_CONFIG))[0]
    except ValueError:  # a kernel's code is no JSON
        return {}
