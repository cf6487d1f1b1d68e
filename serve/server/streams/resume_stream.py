"""Answers that tell their tokens while they come, so that they can go on elsewhere."""

import time
from collections.abc import Callable
from typing import Any

from ...text.openai.resume import realm_comment, tokens_comment
from ...text.outputs import CompletionOutput
from .completion_stream import event

SELDOM = 0.5  # seconds between words about a whole answer


class WholeEvent:
    """Writes the whole answer as the last and only event of a stream."""

    def __init__(self, answer: Callable[[], dict[str, Any]]):
        self._answer = answer

    def begin(self) -> bytes:
        return b""

    def chunks(self, outputs: list[CompletionOutput]) -> bytes:
        return b""

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        return event(self._answer())

    def skip(self, outputs: list[CompletionOutput], count: int) -> None:
        """Nothing: the answer has it."""

    def failed(self, error: dict[str, Any]) -> bytes:
        return event({"error": error})


class TokenReporter:
    """Writes comments with the token ids of an answer that may be resumed, at most one every `seconds`; None
    writes none. The `realm` of the tokens is sent before the first ones, and again after a change."""

    def __init__(self, seconds: float | None, realm: Callable[[], str]):
        self._seconds, self._last = seconds, time.monotonic()
        self._realm, self._named = realm, ""
        self._held: list[CompletionOutput] = []

    def __call__(self, outputs: list[CompletionOutput]) -> bytes:
        if self._seconds is None:
            return b""
        self._held += outputs
        now = time.monotonic()
        if now - self._last < self._seconds:
            return b""
        found, self._held, self._last = tokens_comment(self._held), [], now
        before, self._named = self._named, self._realm()
        return found if self._named == before else realm_comment(self._named) + found
