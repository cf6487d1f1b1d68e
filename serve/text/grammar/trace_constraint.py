"""Trace replay: the tokens of a request are given, and the model only scores them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

MASK_WORD_TOKENS = 32  # tokens, one a bit, in a word of a mask


class TraceConstraint:
    """Constraint that allows at each position the token of a trace alone, with the methods of `Constraint`.
    The output begins at position `output_start`. The request ends with the trace: behind it any token is
    allowed."""

    failure: str | None = None

    def __init__(self, trace: Sequence[int], output_start: int, V: int):
        self._trace, self._output_start, self._V, self._num_seen = tuple(trace), output_start, V, 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance to the end of `tokens`: all tokens of the request so far, prompt included."""
        self._num_seen = len(tokens) - self._output_start

    def token_masks(self, draft_tokens: Sequence[int] = ()) -> UInt32[np.ndarray, "positions words"]:
        """Return the mask of the next token, and the mask behind each of `draft_tokens` up to the first that
        is not of the trace."""
        masks = [self._mask(self._num_seen)]
        for i, draft_token in enumerate(draft_tokens, self._num_seen):
            if self._trace[i : i + 1] != (draft_token,):
                break
            masks.append(self._mask(i + 1))
        return np.stack(masks)

    def choose_draft(self, draft_tokens: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Return at most `max_tokens` next tokens of the trace as draft tokens: all will be accepted."""
        return self._trace[self._num_seen : self._num_seen + max_tokens]

    def _mask(self, i: int) -> UInt32[np.ndarray, " words"]:
        bits = np.zeros(-(-self._V // MASK_WORD_TOKENS) * MASK_WORD_TOKENS, np.uint8)
        bits[self._trace[i] if i < len(self._trace) else slice(None)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)
