"""Draft tokens from what the run has written so far: the most frequent continuation in finished outputs and
in the request itself.

SuffixDecoding (Oliaro et al., arXiv 2411.04975), with an index of positions in the stored tokens instead of
suffix trees: the same matches and counts over a bounded number of positions, in a tenth of a tree's memory.
Batch jobs repeat themselves, so one request's output predicts the next one's.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ANCHOR_TOKENS = 3  # tokens of the shortest match
MAX_OCCURRENCES = 32  # latest occurrences of a run that are compared


class SuffixProposal(NamedTuple):
    """Tokens that may follow.

    tokens: draft tokens.
    expected: expected number of right ones.
    """

    tokens: list[int]
    expected: float


NO_PROPOSAL = SuffixProposal([], 0.0)
Occurrence = tuple[Hashable, int]  # key of a stored sequence, and the position in it after an occurrence


class SuffixIndex:
    """Index of stored sequences by their runs of ANCHOR_TOKENS tokens.

    Beyond `capacity` tokens the least recently used sequence is evicted. A sequence is found only with its
    salt. `depth` is the maximum tokens of a match.
    """

    def __init__(self, capacity: int, depth: int):
        self.capacity, self.depth, self.size = capacity, depth, 0
        self.sequences: OrderedDict[Hashable, list[int]] = OrderedDict()
        self.salts: dict[Hashable, bytes] = {}  # of the sequences
        # by a salt and the tokens of a run
        self.occurrences: dict[tuple[bytes, *tuple[int, ...]], list[Occurrence]] = {}

    def extend(self, key: Hashable, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Append tokens to a stored sequence, or store a new one with a salt."""
        stored, salt = self.sequences.setdefault(key, []), self.salts.setdefault(key, salt)
        for token in tokens:
            if len(stored) >= ANCHOR_TOKENS:
                run = (salt, *stored[-ANCHOR_TOKENS:])
                self.occurrences[run] = [
                    *self.occurrences.get(run, ())[-(MAX_OCCURRENCES - 1) :],
                    (key, len(stored)),
                ]
            stored.append(token)
        self.size += len(tokens)
        self._evict_to_capacity(key)

    def drop(self, key: Hashable) -> None:
        """Forget a sequence and all occurrences in it."""
        stored, salt = self.sequences.pop(key), self.salts.pop(key)
        self.size -= len(stored)
        for run in {(salt, *stored[i - ANCHOR_TOKENS : i]) for i in range(ANCHOR_TOKENS, len(stored))}:
            remaining = [occurrence for occurrence in self.occurrences.get(run, ()) if occurrence[0] != key]
            if remaining:
                self.occurrences[run] = remaining
            else:
                self.occurrences.pop(run, None)

    def propose(
        self, context: Sequence[int], k: int, spec_factor: float, min_token_prob: float, salt: bytes = b""
    ) -> SuffixProposal:
        """Return the continuation with the most tokens expected to be right, over all lengths of a match.

        k: maximum draft tokens.
        spec_factor: maximum draft tokens for each token of the match.
        min_token_prob: minimum frequency of a draft token together with all before it.
        """
        occurrences = self.occurrences.get((salt, *context[-ANCHOR_TOKENS:]), []) if k > 0 else []
        lengths = {occurrence: self._match_length(occurrence, context) for occurrence in occurrences}
        best = NO_PROPOSAL
        for length in sorted(set(lengths.values()), reverse=True):
            matches = [occurrence for occurrence, n in lengths.items() if n >= length]
            proposal = self._most_frequent_continuation(
                matches, min(k, max(1, int(spec_factor * length))), min_token_prob
            )
            best = max(best, proposal, key=lambda candidate: candidate.expected)
        for key, _ in occurrences[-1:] if best.tokens else ():
            self.sequences.move_to_end(key)
        return best

    def _match_length(self, occurrence: Occurrence, context: Sequence[int]) -> int:
        """Return the number of tokens before an occurrence that equal the last tokens of the context."""
        stored, end = self.sequences[occurrence[0]], occurrence[1]
        length = ANCHOR_TOKENS
        max_length = min(self.depth, end, len(context))
        while length < max_length and stored[end - length - 1] == context[-length - 1]:
            length += 1
        return length

    def _most_frequent_continuation(
        self, occurrences: list[Occurrence], k: int, min_token_prob: float
    ) -> SuffixProposal:
        """Propose the most frequent token after the occurrences, one position after another.

        Of equally frequent tokens the latest counts. The proposal ends before a token with which the path's
        frequency is below `min_token_prob`.
        """
        tokens, probability, expected = [], 1.0, 0.0
        for i in range(k):
            options = [
                (p, self.sequences[p[0]][p[1] + i])
                for p in occurrences
                if p[1] + i < len(self.sequences[p[0]])
            ]
            if not options:
                break
            counts = Counter(token for _, token in reversed(options))
            token, count = counts.most_common(1)[0]
            probability *= count / len(occurrences)
            if probability < min_token_prob:
                break
            tokens.append(token)
            expected += probability
            occurrences = [occurrence for occurrence, t in options if t == token]
        return SuffixProposal(tokens, expected)

    def _evict_to_capacity(self, newest: Hashable) -> None:
        while self.size > self.capacity and len(self.sequences) > 1:
            oldest = next(key for key in self.sequences if key != newest)
            self.drop(oldest)


class SuffixDrafter:
    """Drafts from an index of each request's tokens, and from a shared index of finished outputs.

    Requests share outputs only with an equal cache salt: the speed of an output tells nothing about others.
    """

    def __init__(
        self, depth: int = 24, capacity: int = 100_000, spec_factor: float = 1.0, min_token_prob: float = 0.1
    ):
        self.depth = depth
        self.capacity = capacity
        self.spec_factor = spec_factor
        self.min_token_prob = min_token_prob
        self.finished_outputs, self.num_outputs = SuffixIndex(capacity, depth), 0
        self.requests: dict[Hashable, tuple[SuffixIndex, int]] = {}  # index, and tokens of the prompt

    def begin(self, request: Hashable, prompt: Sequence[int], salt: bytes = b"") -> None:
        index = SuffixIndex(self.capacity, self.depth)
        index.extend(request, prompt, salt)
        self.requests[request] = index, len(prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self.requests[request][0].extend(request, tokens)

    def propose(self, request: Hashable, k: int) -> list[int]:
        index = self.requests[request][0]
        context, salt = index.sequences[request][-self.depth :], index.salts[request]
        options = (
            stored.propose(context, k, self.spec_factor, self.min_token_prob, salt)
            for stored in (index, self.finished_outputs)
        )
        return max(options, key=lambda proposal: proposal.expected).tokens

    def end(self, request: Hashable) -> None:
        """Forget a request, and store its output for others, up to the capacity."""
        if request not in self.requests:
            return
        index, prompt = self.requests.pop(request)
        output = index.sequences[request][prompt:][-self.capacity :]
        if len(output) > ANCHOR_TOKENS:
            self.num_outputs += 1
            self.finished_outputs.extend(self.num_outputs, output, index.salts[request])
