"""Draft tokens from what the run has written so far: the most frequent continuation in finished outputs and
in the request itself.

SuffixDecoding (Oliaro et al., arXiv 2411.04975), with an index of places in the stored tokens in place of
suffix trees: the same matches and counts over a bounded number of places, in a tenth of a tree's memory.
Batch jobs repeat themselves, so one request's output predicts the next one's.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ANCHOR = 3  # tokens of the shortest match
PLACES = 32  # latest places of a run that are compared


class SuffixProposal(NamedTuple):
    """Tokens that may follow, and how many of them are expected to be right."""

    tokens: list[int]
    expected: float


NOTHING = SuffixProposal([], 0.0)
Place = tuple[Hashable, int]  # a stored sequence, and the place in it after an occurrence


class SuffixIndex:
    """Stored sequences by the runs of tokens in them; beyond `capacity` tokens the least recently used is
    evicted."""

    def __init__(self, capacity: int, depth: int):
        self.capacity, self.depth, self.size = capacity, depth, 0
        self.sequences: OrderedDict[Hashable, list[int]] = OrderedDict()
        self.places: dict[tuple[int, ...], list[Place]] = {}

    def extend(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Append tokens to a stored sequence, or to a new one."""
        stored = self.sequences.setdefault(key, [])
        for token in tokens:
            if len(stored) >= ANCHOR:
                run = tuple(stored[-ANCHOR:])
                self.places[run] = [*self.places.get(run, ())[-(PLACES - 1) :], (key, len(stored))]
            stored.append(token)
        self.size += len(tokens)
        self._trim(key)

    def drop(self, key: Hashable) -> None:
        """Forget a sequence and every place in it."""
        stored = self.sequences.pop(key)
        self.size -= len(stored)
        for run in {tuple(stored[i - ANCHOR : i]) for i in range(ANCHOR, len(stored))}:
            left = [place for place in self.places.get(run, ()) if place[0] != key]
            if left:
                self.places[run] = left
            else:
                self.places.pop(run, None)

    def guess(self, context: Sequence[int], k: int, factor: float, least: float) -> SuffixProposal:
        """The continuation with the most tokens expected to be right, over all lengths of a match."""
        places = self.places.get(tuple(context[-ANCHOR:]), []) if k > 0 else []
        lengths = {place: self._match(place, context) for place in places}
        best = NOTHING
        for length in sorted(set(lengths.values()), reverse=True):
            found = [place for place, n in lengths.items() if n >= length]
            guess = self._vote(found, min(k, max(1, int(factor * length))), least)
            best = max(best, guess, key=lambda g: g.expected)
        for key, _ in places[-1:] if best.tokens else ():
            self.sequences.move_to_end(key)
        return best

    def _match(self, place: Place, context: Sequence[int]) -> int:
        """Tokens before a place that equal the context's last ones."""
        stored, end = self.sequences[place[0]], place[1]
        length = ANCHOR
        most = min(self.depth, end, len(context))
        while length < most and stored[end - length - 1] == context[-length - 1]:
            length += 1
        return length

    def _vote(self, places: list[Place], k: int, least: float) -> SuffixProposal:
        """Token by token the most frequent one, the latest among equals, until so sure a path is not known
        any more."""
        tokens, sure, expected = [], 1.0, 0.0
        for i in range(k):
            options = [
                (p, self.sequences[p[0]][p[1] + i]) for p in places if p[1] + i < len(self.sequences[p[0]])
            ]
            if not options:
                break
            counts = Counter(token for _, token in reversed(options))
            token, count = counts.most_common(1)[0]
            sure *= count / len(places)
            if sure < least:
                break
            tokens.append(token)
            expected += sure
            places = [place for place, t in options if t == token]
        return SuffixProposal(tokens, expected)

    def _trim(self, newest: Hashable) -> None:
        while self.size > self.capacity and len(self.sequences) > 1:
            oldest = next(key for key in self.sequences if key != newest)
            self.drop(oldest)


class SuffixDrafter:
    """Every request's own tokens in an index of its own, and finished outputs in one that all share."""

    def __init__(self, depth: int = 24, capacity: int = 100_000, factor: float = 1.0, least: float = 0.1):
        self.depth, self.capacity, self.factor, self.least = depth, capacity, factor, least
        self.finished, self.count = SuffixIndex(capacity, depth), 0
        self.requests: dict[Hashable, tuple[SuffixIndex, int]] = {}  # and the prompt's length

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:
        self.requests[request] = SuffixIndex(self.capacity, self.depth), len(prompt)
        self.extend(request, prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self.requests[request][0].extend(request, tokens)

    def guess(self, request: Hashable, k: int) -> list[int]:
        own = self.requests[request][0]
        context = own.sequences[request][-self.depth :]
        options = (index.guess(context, k, self.factor, self.least) for index in (own, self.finished))
        return max(options, key=lambda guess: guess.expected).tokens

    def end(self, request: Hashable) -> None:
        """Its output is kept for others, up to the capacity."""
        if request not in self.requests:
            return
        index, prompt = self.requests.pop(request)
        output = index.sequences[request][prompt:][-self.capacity :]
        if len(output) > ANCHOR:
            self.count += 1
            self.finished.extend(self.count, output)
