"""Records of a step: its scheduled tokens, and the limits of the scheduler."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....kvcache.pages import POOLED, Batch
from ...options.engine import most_tokens
from ...runtime.compiled.batches import fill
from .request import Request


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens [start, start + count) of a request, computed in this step; the last of them may be draft
    tokens.

    ON_DEVICE among these stands for one that the device proposes.
    """

    request: Request
    start: int
    count: int
    guesses: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    def write(self, batch: Batch, row: int, seats: int) -> None:
        """Fill in a row of a batch: the tokens that the host knows, then draft tokens; the rest of `count`
        is on the device. A prefill's row also has the prompt's token behind it, whose score its last hidden
        state gives, or that its hidden states are pooled."""
        request, prompt = self.request, self.request.prompt
        assert request.slot is not None
        known = request.tokens[self.start : self.end]
        fill(batch, row, [*known, *self.guesses], self.start, request.pages, request.slot % seats)
        batch.count[row] = self.count
        if batch.after is not None and request.pool is not None:
            batch.after[row] = POOLED
        elif batch.after is not None and self.end < len(prompt):
            batch.after[row] = prompt[self.end]

    @property
    def is_constrained(self) -> bool:
        """True if a grammar limits what it samples, and has to read the sampled token before the next."""
        request = self.request
        return request.constraint is not None and self.end - len(self.guesses) >= len(request.tokens)

    @property
    def is_awaiting(self) -> bool:
        """True if its grammar has yet to read the token that is computed, so that its mask is not known."""
        return self.request.constraint is not None and self.start >= len(self.request.tokens)


Guess = Callable[[list[ScheduledTokens]], Sequence[Sequence[int]]]  # guesses for each row of decode


@dataclass
class SchedulerOutput:
    """Work of one step: rows of `decode`, or of `verify` if one of them has draft tokens."""

    admitted: list[Request] = field(default_factory=list)  # their slots are set up first
    prefill: list[ScheduledTokens] = field(default_factory=list)  # chunks of prompts
    decode: list[ScheduledTokens] = field(default_factory=list)  # rows of decode
    verify: list[ScheduledTokens] = field(default_factory=list)

    @property
    def works(self) -> list[ScheduledTokens]:
        return [*self.prefill, *self.decode, *self.verify]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.verify)


class SchedulerConfig(NamedTuple):
    """Limits of a step."""

    max_num_seqs: int  # slots
    max_prefill_tokens: int  # prompt tokens of a step, in each shard
    row: int  # prompt tokens charged for each row that is begun
    decode_steps: int  # decode steps of one dispatch, of at most `multi_step_rows` rows
    guesses: int = 0  # draft tokens of a row
    groups: int = 1  # groups of slots whose steps are in flight together, micro-batches of a pipeline
    shards: int = 1  # data-parallel shards; each has an equal range of the slots
    multi_step_rows: int | None = None  # of a shard; None: any number

    @property
    def shard_seats(self) -> int:
        return self.max_num_seqs // self.shards

    def steps_for(self, taken: Collection[int]) -> int:
        """Return the decode steps of one dispatch for requests in the slots `taken`."""
        most = self.multi_step_rows
        return self.decode_steps if most is None or max(self.loads(taken)) <= most else 1

    def shard(self, slot: int) -> int:
        return slot // self.shard_seats

    def of(self, shard: int, taken: Mapping[int, Request]) -> Iterator[Request]:
        """Yield a shard's requests out of `taken`, which are by slot."""
        if self.shards == 1:
            return iter(taken.values())
        return (request for slot, request in taken.items() if self.shard(slot) == shard)

    def loads(self, taken: Collection[int]) -> list[int]:
        if self.shards == 1:
            return [len(taken)]
        load = Counter(map(self.shard, taken))
        return [load[shard] for shard in range(self.shards)]

    def seat(self, free: list[int], taken: Iterable[int], shard: int = 0) -> int:
        """Take a slot of a shard from the heap of free ones: the lowest in the group with the fewest
        taken."""
        if self.groups == self.shards == 1:
            return heapq.heappop(free)
        load = Counter(slot % self.groups for slot in taken)
        own = (slot for slot in free if self.shard(slot) == shard)
        slot = min(own, key=lambda slot: (load[slot % self.groups], slot))
        free.remove(slot)
        heapq.heapify(free)
        return slot

    @property
    def most_tokens(self) -> int:
        return most_tokens(self.max_prefill_tokens, self.decode_steps, self.guesses)
