"""A prompt: token ids, and spans of them in whose place the model computes embeddings that an encoder makes
of other content, such as images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EmbeddingSpan:
    """Tokens [start, start + count) of a prompt, whose embeddings an encoder makes of `encoder_input`.

    digest: hash of all that decides these embeddings, besides the encoder's parameters. Pages and embeddings
        of equal digests are shared.
    encoder_input: arrays on the host whose first axis is the content's items, as `Encoder.abstract_input`.
    """

    start: int
    count: int
    digest: bytes
    encoder_input: Any = field(repr=False, compare=False)

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the spans whose ids are placeholders, in ascending order."""

    tokens: Sequence[int]
    spans: tuple[EmbeddingSpan, ...] = ()


def overlapping_spans(spans: Sequence[EmbeddingSpan], start: int, end: int) -> Iterator[EmbeddingSpan]:
    """Yield the spans that overlap the tokens [start, end)."""
    return (span for span in spans if max(span.start, start) < min(span.end, end))
