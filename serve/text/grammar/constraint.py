"""State of a request in its grammar: the tokens that may come next."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt32

from .vocabulary import panics_as_errors

if TYPE_CHECKING:
    import llguidance


NOTHING = "no token of the vocabulary may follow"


class Constraint:
    """Follows the tokens of one request, whose output begins at position `start`. End tokens are allowed
    exactly where the grammar accepts the output so far; once it can take no more, or behind an end token,
    nothing else is. `failure` says why the request cannot continue: the grammar became too complex, or the
    vocabulary lacks what it needs. `origin` is kept alive, since the matcher shares its memory."""

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        ends: frozenset[int],
        first: UInt32[np.ndarray, " words"],
        start: int,
        origin: object = None,
    ):
        self._matcher, self._ends, self._next, self._origin = matcher, ends, first, origin
        self._seen, self._is_over = start, False
        self.failure: str | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance by a request's tokens, of which all are given, prompt included."""
        new, self._seen = tokens[self._seen :], len(tokens)
        try:
            for token in new:
                self._take(token)
            if new:
                self._next = self._ending if self._is_over else mask_of(self._matcher)
        except ValueError as error:
            self.failure = str(error)

    @property
    def _ending(self) -> UInt32[np.ndarray, " words"]:
        """Mask behind an end token: end tokens alone."""
        bits = np.zeros(self._next.size * 32, np.uint8)
        bits[[*self._ends]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _take(self, token: int) -> None:
        self._is_over = self._is_over or token in self._ends
        with panics_as_errors():
            if not (self._is_over or self._matcher.try_consume_tokens([token])):
                raise ValueError(readable(self._matcher.get_error()) or f"token {token} is not allowed")

    def masks(self, guesses: Sequence[int] = ()) -> UInt32[np.ndarray, "positions words"]:
        """Return the mask of the next token, and those behind each of the `guesses` (draft tokens) up to the
        first that is not allowed."""
        found = [self._next]
        with suppress(ValueError):
            for guess in () if self._is_over or self.failure else guesses:
                if guess in self._ends or not self._matcher.try_consume_tokens([guess]):
                    break
                found.append(mask_of(self._matcher))
        if len(found) > 1:
            self._matcher.rollback(len(found) - 1)
        return np.stack(found)

    def ahead(self, guesses: Sequence[int], most: int) -> Sequence[int]:
        """Return the draft tokens up to the first that is not allowed, or the tokens that the grammar forces
        if these are more. Draft tokens that only the device knows have no masks: nothing is returned for
        them."""
        if self._is_over or self.failure:
            return ()
        known = list(itertools.takewhile(lambda token: token >= 0 and token not in self._ends, guesses))
        legal = known[: self._matcher.validate_tokens(known)]
        forced = self._matcher.compute_ff_tokens()[:most]
        return legal if len(legal) >= len(forced) else forced


def mask_of(matcher: "llguidance.LLMatcher") -> UInt32[np.ndarray, " words"]:
    """Return the mask of the tokens that a grammar allows next. Raises ValueError with the reason if it
    cannot continue."""
    with panics_as_errors():
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if bits and (matcher.is_accepting() or not matcher.is_stopped()):
            return np.frombuffer(bits, np.uint32)
    raise ValueError(readable(matcher.get_error()) or NOTHING)


def readable(error: str) -> str:
    """Return llguidance's reason without its parser state; empty for a bare error name."""
    reason = error.partition("\n<state>")[0].strip()
    return "" if reason.isidentifier() else reason
