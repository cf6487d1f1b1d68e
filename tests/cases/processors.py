"""The logits processors of the example, and requests that ask for them."""

import sys
from dataclasses import replace
from pathlib import Path

from cases.invariance import PARAMS

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from logits_processors import NONE, ban_at_first, no_repeated_ngram, thinking_budget

__all__ = ["ASKED", "EXTRA", "NONE", "PROCESSORS", "ban_at_first", "no_repeated_ngram", "thinking_budget"]
PROCESSORS = [ban_at_first, no_repeated_ngram, thinking_budget]
EXTRA = [
    {"banned": range(2, 14), "banned_steps": 6},
    None,
    {"ngram_size": 1},
    {"thinking_budget": 5, "thinking_end": 11},
    None,
    {"ngram_size": 2, "thinking_budget": 12, "thinking_end": 7},
    {"banned": [3, 4, 5], "banned_steps": 30, "ngram_size": 3},
]
ASKED = [replace(params, extra_args=extra) for params, extra in zip(PARAMS, EXTRA, strict=True)]
