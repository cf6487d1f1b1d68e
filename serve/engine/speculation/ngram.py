"""Draft tokens from the request's own text: what followed its last few tokens the last time they appeared.

Prompt lookup decoding (Saxena 2023, as in Transformers and vLLM). It pays most where the output repeats the
prompt, as in summaries, answers from a text and edits of code.
"""

from collections.abc import Hashable, Sequence

WINDOW_TOKENS = 8192  # latest tokens of a request that are indexed: bounds its memory


class NgramIndex:
    """Sequence of tokens, with an index of its runs of `min_n` to `max_n` tokens.

    after: position after the latest occurrence of each run.
    window: latest tokens that are indexed.
    """

    def __init__(self, min_n: int, max_n: int, window: int = WINDOW_TOKENS):
        self.min_n, self.max_n, self.window = min_n, max_n, window
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and index the runs that end before each of them."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        for n in range(self.min_n, self.max_n + 1):
            first = max(n, start)
            before = self.tokens[first - n : end - 1]
            self.after.update(
                zip(zip(*(before[i:] for i in range(n)), strict=False), range(first, end), strict=False)
            )
        for position in range(max(start - self.window, self.min_n), end - self.window):
            for run in self._ngrams(position):
                if self.after.get(run) == position:
                    del self.after[run]

    def propose(self, k: int) -> list[int]:
        """Return the k tokens that followed the latest earlier occurrence of the sequence's longest last
        run."""
        for run in self._ngrams(len(self.tokens)):
            if run in self.after:
                return self._copy_from(self.after[run], k)
        return []

    def _ngrams(self, end: int) -> list[tuple[int, ...]]:
        """Return the runs that end before position `end`, the longest first."""
        return [tuple(self.tokens[end - n : end]) for n in range(min(self.max_n, end), self.min_n - 1, -1)]

    def _copy_from(self, start: int, k: int) -> list[int]:
        """Return k tokens from position `start` on; past the end the copy repeats from `start`."""
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(k)]


class NgramDrafter:
    """Prompt lookup for every running request, in O(1) a token."""

    def __init__(self, min_n: int, max_n: int, window: int = WINDOW_TOKENS):
        self.min_n, self.max_n, self.window = min_n, max_n, window
        self.indexes: dict[Hashable, NgramIndex] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], salt: bytes = b"") -> None:
        self.indexes[request] = NgramIndex(self.min_n, self.max_n, self.window)
        self.extend(request, prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self.indexes[request].extend(tokens)

    def propose(self, request: Hashable, k: int) -> list[int]:
        return self.indexes[request].propose(k)

    def end(self, request: Hashable) -> None:
        self.indexes.pop(request, None)
