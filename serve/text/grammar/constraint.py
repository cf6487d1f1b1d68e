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


NO_TOKEN_ALLOWED = "no token of the vocabulary may follow"


class Constraint:
    """State of one request in its grammar. The output begins at position `output_start`.

    End tokens are allowed exactly where the grammar accepts the output so far. If it accepts no more, or
    behind an end token, only end tokens are allowed. `origin` is kept alive: the matcher shares its memory.

    failure: why the request cannot continue (the grammar became too complex, or the vocabulary lacks a token
        that it needs); None if it can
    """

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        eos_ids: frozenset[int],
        first_mask: UInt32[np.ndarray, " words"],
        output_start: int,
        origin: object = None,
    ):
        self._matcher, self._eos_ids, self._next_mask, self._origin = matcher, eos_ids, first_mask, origin
        self._num_seen, self._is_over = output_start, False
        self.failure: str | None = None

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance to the end of `tokens`: all tokens of the request so far, prompt included."""
        new_tokens, self._num_seen = tokens[self._num_seen :], len(tokens)
        try:
            for token in new_tokens:
                self._accept(token)
            if new_tokens:
                self._next_mask = self._end_mask if self._is_over else next_token_mask(self._matcher)
        except ValueError as error:
            self.failure = str(error)

    @property
    def _end_mask(self) -> UInt32[np.ndarray, " words"]:
        """Mask behind an end token: end tokens alone."""
        bits = np.zeros(self._next_mask.size * 32, np.uint8)
        bits[[*self._eos_ids]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def _accept(self, token: int) -> None:
        self._is_over = self._is_over or token in self._eos_ids
        with panics_as_errors():
            if not (self._is_over or self._matcher.try_consume_tokens([token])):
                raise ValueError(
                    strip_parser_state(self._matcher.get_error()) or f"token {token} is not allowed"
                )

    def token_masks(self, draft_tokens: Sequence[int] = ()) -> UInt32[np.ndarray, "positions words"]:
        """Return the mask of the next token, and the mask behind each of `draft_tokens` up to the first that
        is not allowed."""
        masks = [self._next_mask]
        with suppress(ValueError):
            for draft_token in () if self._is_over or self.failure else draft_tokens:
                if draft_token in self._eos_ids or not self._matcher.try_consume_tokens([draft_token]):
                    break
                masks.append(next_token_mask(self._matcher))
        if len(masks) > 1:
            self._matcher.rollback(len(masks) - 1)
        return np.stack(masks)

    def choose_draft(self, draft_tokens: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Return the draft tokens up to the first that is not allowed, or at most `max_tokens` tokens that
        the grammar forces if these are more. Draft tokens that only the device knows (below 0) have no masks,
        and are not returned."""
        if self._is_over or self.failure:
            return ()
        known = list(
            itertools.takewhile(lambda token: token >= 0 and token not in self._eos_ids, draft_tokens)
        )
        legal = known[: self._matcher.validate_tokens(known)]
        forced = self._matcher.compute_ff_tokens()[:max_tokens]
        return legal if len(legal) >= len(forced) else forced


def next_token_mask(matcher: "llguidance.LLMatcher") -> UInt32[np.ndarray, " words"]:
    """Return the mask of the tokens that a grammar allows next. Raises ValueError with the reason if it
    cannot continue."""
    with panics_as_errors():
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if bits and (matcher.is_accepting() or not matcher.is_stopped()):
            return np.frombuffer(bits, np.uint32)
    raise ValueError(strip_parser_state(matcher.get_error()) or NO_TOKEN_ALLOWED)


def strip_parser_state(error: str) -> str:
    """Return llguidance's reason without its parser state; empty for a bare error name."""
    reason = error.partition("\n<state>")[0].strip()
    return "" if reason.isidentifier() else reason
