"""Draft tokens from the request's own text: what followed its last few tokens the last time they appeared.

Prompt lookup decoding (Saxena 2023, as in Transformers and vLLM). It pays most where the output repeats the
prompt, as in summaries, answers from a text and edits of code.
"""

from collections.abc import Hashable, Sequence

WINDOW = 8192  # latest tokens of a request that are indexed: what bounds its memory


class Lookup:
    """Sequence, and the place behind the latest occurrence of each run of `low` to `high` tokens."""

    def __init__(self, low: int, high: int, window: int = WINDOW):
        self.low, self.high, self.window = low, high, window
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # the place after the latest occurrence of a run

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; the runs that end before each of them can be found from now on."""
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        self.tokens += tokens
        for n in range(self.low, self.high + 1):
            first = max(n, start)
            before = self.tokens[first - n : end - 1]
            self.after.update(
                zip(zip(*(before[i:] for i in range(n)), strict=False), range(first, end), strict=False)
            )
        for place in range(max(start - self.window, self.low), end - self.window):
            for run in self._runs(place):
                if self.after.get(run) == place:
                    del self.after[run]

    def guess(self, k: int) -> list[int]:
        """Return the k tokens after the latest earlier place of the longest run that ends the sequence."""
        for run in self._runs(len(self.tokens)):
            if run in self.after:
                return self._copied(self.after[run], k)
        return []

    def _runs(self, end: int) -> list[tuple[int, ...]]:
        """Return the runs that end before a place, the longest first."""
        return [tuple(self.tokens[end - n : end]) for n in range(min(self.high, end), self.low - 1, -1)]

    def _copied(self, start: int, k: int) -> list[int]:
        """Return k tokens from a place on; past the end they repeat, as a loop would."""
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(k)]


class NgramDrafter:
    """Prompt lookup for every running request, in O(1) a token."""

    def __init__(self, low: int, high: int, window: int = WINDOW):
        self.low, self.high, self.window = low, high, window
        self.requests: dict[Hashable, Lookup] = {}

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        self.requests[request] = Lookup(self.low, self.high, self.window)
        self.extend(request, prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self.requests[request].extend(tokens)

    def guess(self, request: Hashable, k: int) -> list[int]:
        return self.requests[request].guess(k)

    def end(self, request: Hashable) -> None:
        self.requests.pop(request, None)
