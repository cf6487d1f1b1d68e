"""Trace replay: the tokens of a request are given, and the model only scores them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

WORD = 32  # tokens of a mask's word


class TraceConstraint:
    """Allows at each position the token of a trace alone, as a grammar would: it has the methods of
    `Constraint`. The output begins at position `start`; the request ends with the trace, so nothing is
    limited behind it."""

    failure: str | None = None

    def __init__(self, trace: Sequence[int], start: int, V: int):
        self._trace, self._start, self._V, self._seen = tuple(trace), start, V, 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance by a request's tokens, of which all are given, prompt included."""
        self._seen = len(tokens) - self._start

    def masks(self, guesses: Sequence[int] = ()) -> UInt32[np.ndarray, "positions words"]:
        """Return the mask of the next token, and those behind each draft token up to the first that is not of
        the trace."""
        found = [self._mask(self._seen)]
        for i, guess in enumerate(guesses, self._seen):
            if self._trace[i : i + 1] != (guess,):
                break
            found.append(self._mask(i + 1))
        return np.stack(found)

    def ahead(self, guesses: Sequence[int], most: int) -> Sequence[int]:
        """Return the next tokens of the trace as draft tokens: all of them are right."""
        return self._trace[self._seen : self._seen + most]

    def _mask(self, i: int) -> UInt32[np.ndarray, " words"]:
        bits = np.zeros(-(-self._V // WORD) * WORD, np.uint8)
        bits[self._trace[i] if i < len(self._trace) else slice(None)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)
