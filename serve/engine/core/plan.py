"""What one step computes, and how much it may be."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....kvcache.pages import Batch
from ...options.engine import most_tokens
from ...runtime.compiled.batches import fill
from .request import Request


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """A request's tokens [start, start + count) are computed in this step; the last of them may be guesses.

    ON_DEVICE among them stands for one that the device makes.
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
        state gives."""
        request, prompt = self.request, self.request.prompt
        assert request.slot is not None
        known = request.tokens[self.start : self.end]
        fill(batch, row, [*known, *self.guesses], self.start, request.pages, request.slot % seats)
        batch.count[row] = self.count
        if batch.after is not None and self.end < len(prompt):
            batch.after[row] = prompt[self.end]

    @property
    def is_constrained(self) -> bool:
        """Whether it samples what a grammar has to allow, and reads before the request's next token."""
        request = self.request
        return request.constraint is not None and self.end - len(self.guesses) >= len(request.tokens)

    @property
    def is_awaiting(self) -> bool:
        """Whether its grammar has still to read the token that is computed: what it allows behind it is not
        known."""
        return self.request.constraint is not None and self.start >= len(self.request.tokens)


Guess = Callable[[list[ScheduledTokens]], Sequence[Sequence[int]]]  # guesses for each row of decode


@dataclass
class SchedulerOutput:
    """One step: requests to seat first, chunks of prompts, and rows of decode, or of verification if any has
    guesses."""

    seats: list[Request] = field(default_factory=list)
    prefill: list[ScheduledTokens] = field(default_factory=list)
    decode: list[ScheduledTokens] = field(default_factory=list)
    verify: list[ScheduledTokens] = field(default_factory=list)

    @property
    def works(self) -> list[ScheduledTokens]:
        return [*self.prefill, *self.decode, *self.verify]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.verify)


class SchedulerConfig(NamedTuple):
    """What the scheduler may hand out: seats, prompt tokens a step, of which a row that is begun costs `row`,
    decode steps of one dispatch, guesses of a row; and `groups` of seats whose steps are in flight together
    (a pipeline's micro-batches). Each of `shards` has so many prompt tokens, and an equal part of the seats,
    which follow each other."""

    max_num_seqs: int
    max_prefill_tokens: int
    row: int
    decode_steps: int
    guesses: int = 0
    groups: int = 1
    shards: int = 1

    @property
    def shard_seats(self) -> int:
        return self.max_num_seqs // self.shards

    def shard(self, slot: int) -> int:
        """The shard of a seat."""
        return slot // self.shard_seats

    def of(self, shard: int, taken: Mapping[int, Request]) -> Iterator[Request]:
        """Those of a shard, of requests by their seats."""
        if self.shards == 1:
            return iter(taken.values())
        return (request for slot, request in taken.items() if self.shard(slot) == shard)

    def loads(self, taken: Collection[int]) -> list[int]:
        """Seats that are taken in each shard."""
        if self.shards == 1:
            return [len(taken)]
        load = Counter(map(self.shard, taken))
        return [load[shard] for shard in range(self.shards)]

    def turn_after(self, group: int, active: Collection[int]) -> int:
        """The group whose turn comes next: the first that is active."""
        turns = [(group + 1 + i) % self.groups for i in range(self.groups)]
        return next((group for group in turns if group in active), turns[0])

    def seat(self, free: list[int], taken: Iterable[int], shard: int = 0) -> int:
        """Take a seat of a shard from the heap of free ones: the lowest in the group with the fewest that are
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
    def most_in_turn(self) -> int:
        """Tokens of one sequence that a step computes one by one at most."""
        return max(self.decode_steps, self.guesses + 1)

    @property
    def most_tokens(self) -> int:
        """Tokens of one sequence that a step computes at most."""
        return most_tokens(self.max_prefill_tokens, self.decode_steps, self.guesses)
