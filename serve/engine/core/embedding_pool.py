"""Bookkeeping of the device's pool of embeddings: which rows hold the embeddings of which content, and which
prompts fit it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from ....model.config import ModelConfig
from ....model.embeddings.encoder import NO_ROW, Encoder
from ....model.embeddings.prompt import EmbeddingSpan, overlapping_spans
from ...runtime.compiled.encoder_input import check_encoder_input

Rows = Int[np.ndarray, " count"]


class EmbeddingPool:
    """Rows of the pool by the content of spans, least recently used first.

    A step holds the rows that its chunks read until the next step is planned. Other rows may be evicted: the
    device runs steps in order, and a request whose rows were evicted has its span encoded again. The first
    prompt in the scheduler's order finds the whole pool free, and `SpanLimits` refuses prompts that do not
    fit it. So it always goes on.

    num_rows: rows of the pool; 0 without an encoder.
    alignment: tokens of whose multiples prefills begin.
    """

    def __init__(self, num_rows: int, alignment: int = 1):
        self.num_rows, self._alignment = num_rows, alignment
        self.clear()

    def clear(self) -> None:
        """Forget all contents: the device's pool is new, or the encoder has other parameters."""
        self._free = list(range(self.num_rows))
        self._rows: dict[tuple[bytes, int], Rows] = {}
        self._held: set[tuple[bytes, int]] = set()
        self._to_encode: list[tuple[EmbeddingSpan, Rows]] = []

    def begin_step(self) -> None:
        """Release the rows that the step before holds."""
        self._held.clear()

    def reserve_chunk(self, spans: Sequence[EmbeddingSpan], start: int, count: int) -> tuple[int, Rows]:
        """Hold the rows of a chunk's spans, tokens [start, start + count) of a prompt. Returns the number of
        tokens that can be computed now, and the row of each, NO_ROW for tokens outside of spans.

        The chunk ends before the first span whose rows do not fit beside those that are held.
        """
        end = start + count
        for span in overlapping_spans(spans, start, end):
            if self._hold_rows(span) is None:
                end = max(start, span.start // self._alignment * self._alignment)
                break
        rows = np.full(end - start, NO_ROW, np.int32)
        for span in overlapping_spans(spans, start, end):
            first, last = max(start, span.start), min(end, span.end)
            span_rows = self._rows[span.digest, span.count]
            rows[first - start : last - start] = span_rows[first - span.start : last - span.start]
        return end - start, rows

    def _hold_rows(self, span: EmbeddingSpan) -> Rows | None:
        """Hold the rows of a span, new ones if it has none; returns them, or None if too few can be free."""
        content = span.digest, span.count
        rows = self._rows.pop(content, None)
        if rows is None:
            evictable = [key for key in self._rows if key not in self._held]
            if len(self._free) + sum(count for _, count in evictable) < span.count:
                return None
            while len(self._free) < span.count:
                self._free += self._rows.pop(evictable.pop(0)).tolist()
            rows = np.array([self._free.pop() for _ in range(span.count)], np.int32)
            self._to_encode.append((span, rows))
        self._rows[content] = rows  # the most recently used is last
        self._held.add(content)
        return rows

    def take_unencoded(self) -> list[tuple[EmbeddingSpan, Rows]]:
        """Return the spans that are to be encoded before the step, each with its rows."""
        spans, self._to_encode = self._to_encode, []
        return spans


@dataclass(frozen=True)
class SpanLimits:
    """Limits of an engine on the spans of a prompt.

    encoder: encoder of the model, if it has one.
    pool_rows: embeddings that the pool holds.
    alignment: tokens of whose multiples prefills begin.
    """

    encoder: Encoder | None = None
    pool_rows: int = 0
    alignment: int = 1

    @classmethod
    def from_config(cls, config: ModelConfig, pool_rows: int) -> "SpanLimits":
        return cls(config.encoder, pool_rows, config.prefill_alignment)

    def check(self, spans: Sequence[EmbeddingSpan], prompt_len: int) -> None:
        """Raise ValueError for spans of a prompt that cannot be computed, TypeError for a digest that is not
        bytes."""
        for span in spans:
            self._check_span(span, prompt_len)
        for span, after in pairwise(spans):
            if span.end > after.start:
                raise ValueError(f"{describe_span(span)} overlap {describe_span(after)}, or are not in order")
        for token in (token for span in spans for token in (span.start, span.end - 1)):
            self._check_block(spans, token // self.alignment * self.alignment)

    def _check_span(self, span: EmbeddingSpan, prompt_len: int) -> None:
        """Raise ValueError for a span that no pool could hold, TypeError for a digest that is not bytes."""
        if self.encoder is None:
            raise ValueError(f"{describe_span(span)} are not allowed: the model has no encoder")
        if not 0 <= span.start < span.end <= prompt_len:
            raise ValueError(f"{describe_span(span)} are not allowed: the prompt has {prompt_len} tokens")
        if not isinstance(span.digest, bytes):
            raise TypeError(f"{describe_span(span)} have a digest that is not bytes")
        if span.count > (rows := check_encoder_input(self.encoder, span.encoder_input)):
            raise ValueError(f"{describe_span(span)} are {span.count}, but the encoder makes {rows} of them")

    def _check_block(self, spans: Sequence[EmbeddingSpan], start: int) -> None:
        """Raise ValueError if the smallest chunk of a prefill needs more embeddings than the pool holds."""
        together = overlapping_spans(spans, start, start + self.alignment)
        needed = sum({(span.digest, span.count): span.count for span in together}.values())
        if needed > self.pool_rows:
            raise ValueError(f"{needed} embeddings are needed at once, but the pool holds {self.pool_rows}")


def describe_span(span: EmbeddingSpan) -> str:
    return f"embeddings of tokens {span.start} to {span.end}"
