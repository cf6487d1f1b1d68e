"""The logits processors of the example, and requests that ask for them."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from cases.invariance import PARAMS

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
example: Any = import_module("logits_processors")
NONE, ban_at_first = example.NONE, example.ban_at_first
PROCESSORS = [ban_at_first, example.no_repeated_ngram, example.thinking_budget]
EXTRA: list[dict[str, Any] | None] = [
    {"thinking_budget": 2, "thinking_end": 12},
    None,
    {"ngram_size": 1},
    {"thinking_budget": 5, "thinking_end": 11},
    None,
    {"ngram_size": 2, "thinking_budget": 12, "thinking_end": 7},
    {"banned": range(2, 14), "banned_steps": 12, "ngram_size": 3},
]
ASKED = [replace(params, extra_args=extra) for params, extra in zip(PARAMS, EXTRA, strict=True)]
