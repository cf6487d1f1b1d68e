"""Records of a step: its scheduled tokens, their results, and the limits of the scheduler."""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from ....model.embeddings.prompt import EmbeddingSpan
from ...options.engine import max_step_tokens
from .request import Request


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Tokens [start, start + count) of a request, computed in this step.

    draft_tokens: the last of these tokens, which are drafts. ON_DEVICE stands for a token that the device
        proposes.
    embedding_rows: row of the pool of embeddings of each token, as `InputEmbeddings.rows`; None if the prompt
        has no spans of embeddings.
    """

    request: Request
    start: int
    count: int
    draft_tokens: tuple[int, ...] = ()
    embedding_rows: Int[np.ndarray, " count"] | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def scored_positions(self) -> range:
        """Positions of the prompt that the row scores: after each of its tokens, if that has no score yet."""
        request = self.request
        if not request.needs_prompt_scores:
            return range(0)
        return range(max(request.first_unscored, self.start + 1), min(self.end + 1, len(request.prompt)))

    def score_columns(self, positions: range) -> slice:
        """Return the columns of the row's tokens before `positions`, which hold the scores."""
        return slice(positions.start - self.start - 1, positions.stop - self.start - 1)

    def cut(self, max_tokens: int) -> Iterator["ScheduledTokens"]:
        """Cut a chunk into rows of at most `max_tokens` tokens."""
        rows = self.embedding_rows
        for first in range(0, self.count, max_tokens):
            count = min(max_tokens, self.count - first)
            row_embeddings = None if rows is None else rows[first : first + count]
            yield ScheduledTokens(self.request, self.start + first, count, embedding_rows=row_embeddings)

    @property
    def is_constrained(self) -> bool:
        """True if a grammar limits the tokens that the row samples; it reads each before the next is
        sampled."""
        request = self.request
        return request.constraint is not None and self.end - len(self.draft_tokens) >= len(request.tokens)

    @property
    def is_awaiting_mask(self) -> bool:
        """True if the row's mask is not known yet: its grammar has yet to read the token that is computed."""
        return self.request.constraint is not None and self.start >= len(self.request.tokens)


class RowResult(NamedTuple):
    """Results of one row of a step."""

    scheduled: ScheduledTokens  # tokens that it computed
    num_sampled: int  # number of tokens that it sampled
    tokens: list[int]  # sampled tokens that its request took: fewer if it ended among them
    is_prompt: bool  # it computed a prompt

    @property
    def has_changed_request(self) -> bool:
        """True if the row changed its request; False for a chunk within a prompt, which samples nothing."""
        return bool(self.tokens) or not self.is_prompt or self.scheduled.request.is_finished


# Returns draft tokens for each decode row.
ProposeDrafts = Callable[[list[ScheduledTokens]], Sequence[Sequence[int]]]


@dataclass
class SchedulerOutput:
    """Work of one step: rows of `decode`, or of `verify` if one of them has draft tokens."""

    admitted: list[Request] = field(default_factory=list)  # their slots are set up first
    prefill: list[ScheduledTokens] = field(default_factory=list)  # chunks of prompts
    decode: list[ScheduledTokens] = field(default_factory=list)  # rows of decode
    verify: list[ScheduledTokens] = field(default_factory=list)
    # spans to encode before the step, each with its rows of the pool of embeddings
    encodes: list[tuple[EmbeddingSpan, Int[np.ndarray, " count"]]] = field(default_factory=list)

    @property
    def scheduled_rows(self) -> list[ScheduledTokens]:
        return [*self.prefill, *self.decode, *self.verify]

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode or self.verify)


class SchedulerConfig(NamedTuple):
    """Limits of a step."""

    max_num_seqs: int  # slots
    max_prefill_tokens: int  # prompt tokens of a step, in each shard
    row_tokens: int  # prompt tokens of a full row; a row that is not full is charged as full
    decode_steps: int  # decode steps of one dispatch, of at most `multi_step_rows` rows
    max_draft_tokens: int = 0  # draft tokens of a row
    groups: int = 1  # groups of slots whose steps are in flight together, micro-batches of a pipeline
    shards: int = 1  # data-parallel shards; each has an equal range of the slots
    multi_step_rows: int | None = None  # rows of a shard; None: any number

    @property
    def shard_slots(self) -> int:
        return self.max_num_seqs // self.shards

    def decode_steps_for(self, taken_slots: Collection[int]) -> int:
        """Return the decode steps of one dispatch for requests in the slots `taken_slots`."""
        max_rows = self.multi_step_rows
        return self.decode_steps if max_rows is None or max(self.shard_loads(taken_slots)) <= max_rows else 1

    def shard_of_slot(self, slot: int) -> int:
        return slot // self.shard_slots

    def requests_in_shard(self, shard: int, requests_by_slot: Mapping[int, Request]) -> Iterator[Request]:
        """Yield the requests of a shard; `requests_by_slot` holds requests by slot."""
        if self.shards == 1:
            return iter(requests_by_slot.values())
        return (request for slot, request in requests_by_slot.items() if self.shard_of_slot(slot) == shard)

    def shard_loads(self, taken_slots: Collection[int]) -> list[int]:
        """Return the number of slots in `taken_slots` that belong to each shard."""
        if self.shards == 1:
            return [len(taken_slots)]
        load = Counter(map(self.shard_of_slot, taken_slots))
        return [load[shard] for shard in range(self.shards)]

    def pop_slot(self, free_slots: list[int], taken_slots: Iterable[int], shard: int = 0) -> int:
        """Take a slot of a shard from the heap of free ones: the lowest in the group with the fewest
        taken."""
        if self.groups == self.shards == 1:
            return heapq.heappop(free_slots)
        load = Counter(slot % self.groups for slot in taken_slots)
        candidates = (slot for slot in free_slots if self.shard_of_slot(slot) == shard)
        slot = min(candidates, key=lambda slot: (load[slot % self.groups], slot))
        free_slots.remove(slot)
        heapq.heapify(free_slots)
        return slot

    @property
    def max_step_tokens(self) -> int:
        return max_step_tokens(self.max_prefill_tokens, self.decode_steps, self.max_draft_tokens)
