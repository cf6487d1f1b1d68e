"""Scheduler: the tokens of the next step. Plain Python over requests and pages, which never touches the
device.

Continuous batching is Orca's (Yu et al., OSDI 2022), chunked prefill beside decode Sarathi's (Agrawal et al.,
arXiv 2308.16369).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from ....kvcache.page_hash import extend_page_hashes
from ....kvcache.sharded_tables import shard_number
from ....kvcache.tables import IN_TIER, PageTables, SequenceTables
from ...kv.offload.page_finder import PageFinder, PoolPageFinder
from ...options.checks import round_up
from ..lora.lora_slots import LoRASlots
from .embedding_pool import EmbeddingPool
from .prefill_delayer import PrefillDelayer, counts_within_budget
from .request import Request
from .scheduler_output import ProposeDrafts, ScheduledTokens, SchedulerConfig, SchedulerOutput
from .waiting_reasons import AdmissionReason, WaitingReasons


class Scheduler:
    """First come, first served within a priority. A request holds a slot and its pages from admission to its
    end.

    Admission takes all pages that a request's known tokens need. When decode needs a page and none is free,
    the request that is last in the queue's order is preempted: it releases its pages and waits again. The
    first in that order always goes on, so everything finishes.

    A sequence that grows beyond `longrope_boundary` tokens is preempted once: all of its keys change
    (longrope).

    recompute_outputs: pages written by prefill and by decode have the same bits. Otherwise the pages of
    decode have other hashes, and generated tokens of a preempted request that are not found are fed through
    decode again, which writes the same bits as the first time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: PageTables,
        root_hash: bytes | None,
        recompute_outputs: bool,
        longrope_boundary: int | None = None,
        prefill_delayer: PrefillDelayer | None = None,
        lora_slots: LoRASlots | None = None,
        embedding_pool: EmbeddingPool | None = None,
    ):
        self.config, self.tables, self.page_size, self.root_hash = config, tables, tables.page_size, root_hash
        self.recompute_outputs = recompute_outputs
        self.longrope_boundary = longrope_boundary
        self.prefill_delayer = prefill_delayer
        self.waiting: list[tuple[tuple[int, int], Request]] = []
        self.running: dict[int, Request] = {}  # by slot
        self.prefilling: dict[int, Request] = {}  # running requests with prompt tokens left to dispatch
        self.free_slots = list(range(config.max_num_seqs))
        self.page_finder: PageFinder = PoolPageFinder(tables)
        self.lora_slots = LoRASlots(0) if lora_slots is None else lora_slots
        self.embedding_pool = EmbeddingPool(0) if embedding_pool is None else embedding_pool
        self.waiting_reasons = WaitingReasons()
        self.group = 0  # group of slots that decodes in this step
        self.preemptions = self.num_aborted = 0  # the latter are still in the queue

    def add(self, request: Request) -> None:
        heapq.heappush(self.waiting, (request.queue_key, request))
        if self.prefill_delayer is not None:
            self.prefill_delayer.on_queued(request, len(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_decoding(self) -> int:
        """Number of decoding requests in the current group. Their prompts are computed, or in flight."""
        return self._decoding_by_group[self.group]

    @property
    def decode_steps(self) -> int:
        """Decode steps of one dispatch while no prompt can start: one while prompts are prefilled, or while a
        grammar has to read each sampled token before the next is sampled."""
        is_constrained = any(request.constraint is not None for request in self.running.values())
        return 1 if self.prefilling or is_constrained else self.config.decode_steps_for(self.running)

    @property
    def max_in_flight(self) -> int:
        """Maximum steps in flight: one for each group that decodes, or for every group while prompts are
        prefilled."""
        groups = self.config.groups
        return groups if groups == 1 or self.prefilling else max(1, len(self._decoding_by_group))

    @property
    def _decoding_by_group(self) -> Counter[int]:
        return Counter(slot % self.config.groups for slot in self.running if slot not in self.prefilling)

    def group_of(self, request: Request) -> int | None:
        """Return the group of a request's slot: one group decodes while the next one's step is planned."""
        return None if request.slot is None else request.slot % self.config.groups

    def select_next_group(self) -> None:
        """Make the next group that decodes the current one."""
        if (groups := self.config.groups) > 1:
            order, active = [(self.group + 1 + i) % groups for i in range(groups)], self._decoding_by_group
            self.group = next((group for group in order if group in active), order[0])

    def schedule(
        self, is_drained: bool, propose_drafts: ProposeDrafts | None = None
    ) -> SchedulerOutput | None:
        """Return the next step, with decode of the current group; None if decode lacks a page.

        is_drained: the results of all steps in flight are read. Only then may a request be preempted for a
            page.
        propose_drafts: proposes draft tokens. The results of the group's steps must be read before.
        """
        rows = self._schedule_decode(1, is_drained)
        if rows is None:
            return None
        admitted, waiting_reason = self.admit()
        if waiting_reason is not None:
            self.waiting_reasons.record(self.waiting[0][1], waiting_reason)
        if not admitted and (steps := self.decode_steps) > 1:
            rows = self._schedule_decode(steps, is_drained)
            if rows is None:
                return None
        chunks = list(self.schedule_prefill())
        encodes = self.embedding_pool.take_unencoded()
        if propose_drafts is not None:
            rows = [
                self._with_draft_tokens(scheduled, draft_tokens)
                for scheduled, draft_tokens in zip(rows, propose_drafts(rows), strict=True)
            ]
        if any(scheduled.draft_tokens for scheduled in rows):
            return SchedulerOutput(admitted, chunks, verify=rows, encodes=encodes)
        return SchedulerOutput(admitted, chunks, rows, encodes=encodes)

    def on_dispatch(self, scheduler_output: SchedulerOutput) -> None:
        """Record that a step is dispatched, and let the pages that its prompts fill be found by their hashes.

        A verified row counts its computed tokens later, when its results are read.
        """
        for scheduled in (*scheduler_output.prefill, *scheduler_output.decode):
            scheduled.request.num_computed_tokens = scheduled.start + scheduled.count
        for scheduled in scheduler_output.prefill:
            if scheduled.request.slot is not None and not self._prompt_tokens_left(scheduled.request):
                self.prefilling.pop(scheduled.request.slot, None)
            self.cache_pages(scheduled.request, scheduled.start, scheduled.request.num_computed_tokens)
        if self.prefill_delayer is not None:
            self.prefill_delayer.on_dispatch(len(scheduler_output.admitted), len(self.running))

    def cache_pages(self, request: Request, start: int, tokens: int) -> None:
        """Let the pages that a request's tokens [start, tokens) fill be found by their hashes. Its first
        `tokens` tokens must be known and computed."""
        full = tokens // self.page_size
        if self.root_hash is None or start // self.page_size == full:
            return
        hashes = self._extend_page_hashes(request, full)
        start, salt = start // self.page_size, request.cache_salt
        self.tables.cache_pages(request.pages, hashes, start, request.tokens, request.state_checkpoints, salt)

    def _extend_page_hashes(self, request: Request, pages: int) -> Sequence[bytes]:
        assert self.root_hash is not None
        root = self.root_hash + request.page_hash_salt + (b"long" if self._is_past_boundary(request) else b"")
        prompt = None if self.recompute_outputs else len(request.prompt)
        hashes, spans = request.page_hashes, request.spans
        extend_page_hashes(hashes, request.tokens, pages, self.page_size, root, prompt, spans)
        return request.page_hashes[:pages]

    def _is_past_boundary(self, request: Request) -> bool:
        return self.longrope_boundary is not None and len(request.tokens) > self.longrope_boundary

    def release(self, request: Request) -> None:
        """Release the slot and the pages of a request that ends or is preempted.

        Steps in flight may still read the pages: the device runs later steps after them.
        """
        assert request.slot is not None
        self.tables.release(request.pages, request.end)
        self.lora_slots.release(request.adapter)
        del self.running[request.slot]
        self.prefilling.pop(request.slot, None)
        heapq.heappush(self.free_slots, request.slot)
        request.pages, request.page_hashes, request.slot, request.num_computed_tokens = [], [], None, 0
        self._cancel_page_fetch(request)

    def cancel_page_fetches(self) -> None:
        """Cancel the page fetches of all waiting requests. A request starts a new fetch at the queue's
        head."""
        for _, request in self.waiting:
            self._cancel_page_fetch(request)

    def _cancel_page_fetch(self, request: Request) -> None:
        self.page_finder.cancel_fetch(request.page_fetch)
        request.page_fetch = None

    def abort(self, request: Request) -> None:
        """Forget a finished request.

        Requests in the queue are removed together once they are half of it, so that aborting many is cheap.
        """
        if request.slot is not None:
            self.release(request)
        else:
            self._cancel_page_fetch(request)
            self.num_aborted += 1
        if 2 * self.num_aborted > len(self.waiting):
            self.waiting, self.num_aborted = [entry for entry in self.waiting if not entry[1].is_finished], 0
            heapq.heapify(self.waiting)
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self.waiting and self.waiting[0][1].is_finished:
            heapq.heappop(self.waiting)

    def preempt(self, request: Request) -> None:
        """Put a running request back into the queue at its old place. Its tokens are kept and its pages can
        still be found by name."""
        self.release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def preempt_until_free(self, pages: int) -> None:
        """Preempt the last requests in the queue's order until `pages` pages of every group are free. The
        results of all steps in flight must be read."""
        while not self.tables.has_free_pages(pages):
            self.preempt(max(self.running.values(), key=lambda r: r.queue_key))

    def _prefill_end(self, request: Request) -> int:
        """Return the number of tokens that prefill computes: the prompt's, and all generated ones but the
        last if prefill gives the bits of decode."""
        if self.recompute_outputs and len(request.tokens) > len(request.prompt):
            return max(len(request.prompt), len(request.tokens) - 1)
        return len(request.prompt)

    def _prompt_tokens_left(self, request: Request) -> int:
        return max(0, self._prefill_end(request) - request.num_computed_tokens)

    def _slot_end(self, request: Request) -> int:
        """Return the tokens with which a request leaves its slot: its end, or one beyond
        `longrope_boundary`."""
        if self.longrope_boundary is None or self._is_past_boundary(request):
            return request.end
        return min(request.end, self.longrope_boundary + 1)

    def _queued_prefill_counts(self) -> list[int]:
        """Return the tokens to compute of each of the first prompts that together fit a step.

        Prompts are in the heap's order, which is nearly the queue's.
        """
        budget, row = self.config.shards * self.config.max_prefill_tokens, self.config.row_tokens
        requests = (
            request for _, request in self.waiting[: max(budget // row, 1)] if not request.is_finished
        )
        tokens = (self._prefill_end(r) - len(self._find_prefix(r)[0]) * self.page_size for r in requests)
        return counts_within_budget(tokens, budget, row)

    def admit(self) -> tuple[list[Request], AdmissionReason | None]:
        """Admit requests from the head of the queue: each gets its cached prefix, new pages and a slot.

        Returns them, and the reason why the next one waits, if one is left.
        """
        admitted, limit = list[Request](), len(self.free_slots)
        while self.waiting:
            request = self.waiting[0][1]
            prefix_or_reason = self._resolve_admission(request)
            if isinstance(prefix_or_reason, AdmissionReason):
                return admitted, prefix_or_reason
            if not admitted:
                limit = self._batched_admission_limit()
            if len(admitted) == limit:
                return admitted, AdmissionReason.PREFILL_BATCHING
            heapq.heappop(self.waiting)
            self._drop_finished()
            self._assign_slot_and_pages(request, prefix_or_reason)
            admitted.append(request)
        return admitted, None

    def _batched_admission_limit(self) -> int:
        """Return how many requests may be admitted in this step, 0 if they are held back to share a prefill.

        They are held back only while no prompt is prefilled and more requests wait than slots are free. A
        prompt could join a prefill that is not finished.
        """
        free = len(self.free_slots)
        if self.prefill_delayer is None or self.prefilling or len(self.waiting) <= free:
            return free
        return self.prefill_delayer.admission_limit(
            free, len(self.running), self.decode_steps, self._queued_prefill_counts()
        )

    def _resolve_admission(self, request: Request) -> SequenceTables | AdmissionReason:
        """Return the cached pages of the request at the head of the queue, or the reason why it waits.

        The pages are those of the best shard with room for the others. The request needs a slot, a LoRA slot
        for its adapter, and pages for its known tokens. One spare page for each running request must remain.
        It waits for a page of its prompt that a running request computes, and for pages from a tier.
        """
        if not self.free_slots:
            return AdmissionReason.NO_SLOT
        if not self.lora_slots.fits(request.adapter):
            return AdmissionReason.ADAPTER
        hashes, loads = self.prefix_hashes(request), self.config.shard_loads(self.running)
        if len(self.tables.shards) > 1:
            shards = self.tables.rank_shard_prefixes(hashes, loads, self.config.shard_slots)
        else:
            prefix, request.page_fetch = self.page_finder.find_or_fetch_prefix(hashes, request.page_fetch)
            if prefix is None:
                return AdmissionReason.KV_TRANSFER
            shards = [prefix]
        for prefix in shards:
            if self._is_prefix_in_flight(hashes, prefix):
                return AdmissionReason.PREFIX_PENDING
            if self.tables.fits(prefix, len(request.tokens), request.end, loads[shard_number(prefix)]):
                return prefix
        return AdmissionReason.NO_PAGES if len(shards) == len(loads) else AdmissionReason.SHARD_FULL

    def _assign_slot_and_pages(self, request: Request, prefix: SequenceTables) -> None:
        request.state_checkpoints = self.tables.state_checkpoints(request.page_hashes, prefix)
        request.pages = self.tables.admit(prefix, len(request.tokens), request.end)
        request.num_computed_tokens = len(prefix[0]) * self.page_size
        self.page_finder.assign_pool_pages(prefix, request.page_hashes, request.pages, request.page_fetch)
        if any(IN_TIER in pages for pages in prefix):
            self.cache_pages(request, 0, request.num_computed_tokens)
        if not request.preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        request.lora_slot = self.lora_slots.reserve(request.adapter)
        request.slot = self.config.pop_slot(self.free_slots, self.running, shard_number(request.pages))
        request.slot_end = self._slot_end(request)
        self.running[request.slot] = request
        if self._prompt_tokens_left(request):  # all pages of a preempted request may be cached
            self.prefilling[request.slot] = request

    def _is_prefix_in_flight(self, hashes: Sequence[bytes], prefix: SequenceTables) -> bool:
        """Return True if a running request of the same shard will compute the first page that was not
        found."""
        page = len(prefix[0])
        if page >= len(hashes):
            return False
        prefilling = self.config.requests_in_shard(shard_number(prefix), self.prefilling)
        return any(
            hashes[page] in r.page_hashes[r.num_computed_tokens // self.page_size :] for r in prefilling
        )

    def _find_prefix(self, request: Request) -> SequenceTables:
        """Return the written pages of a request's known tokens; at least one token is left to compute."""
        return self.page_finder.find_prefix(self.prefix_hashes(request), request.page_fetch)

    def prefix_hashes(self, request: Request) -> Sequence[bytes]:
        """Return the hashes of the pages that a waiting request can use if they are cached.

        They are full pages, and leave at least one token to compute. For a scored prompt they end before the
        first token whose score is missing.
        """
        if self.root_hash is None or request.must_compute_all:
            return []
        hashes = self._extend_page_hashes(request, (len(request.tokens) - 1) // self.page_size)
        if request.needs_prompt_scores and request.first_unscored < len(request.prompt):
            return hashes[: (request.first_unscored - 1) // self.page_size]
        return hashes

    def schedule_prefill(self) -> Iterable[ScheduledTokens]:
        """Yield chunks of prompts in order of rank, within each shard's budget of tokens. A row that is not
        full counts as full. A chunk ends before a span of embeddings that does not fit their pool now."""
        self.embedding_pool.begin_step()
        budget = [self.config.max_prefill_tokens] * self.config.shards
        for request in sorted(self.prefilling.values(), key=lambda r: r.queue_key):
            shard = shard_number(request.pages)
            start, new, rows = request.num_computed_tokens, self._prompt_tokens_left(request), None
            new = min(new, budget[shard])
            if request.spans and new > 0:
                new, rows = self.embedding_pool.reserve_chunk(request.spans, start, new)
            if new > 0:
                scheduled = ScheduledTokens(request, start, new, embedding_rows=rows)
                self.tables.advance_windows(
                    request.pages,
                    scheduled.start,
                    scheduled.start + scheduled.count,
                    request.state_checkpoints,
                )
                yield scheduled
                budget[shard] -= round_up(new, self.config.row_tokens)

    def _schedule_decode(self, steps: int, is_drained: bool) -> list[ScheduledTokens] | None:
        """Return a row for every decoding request of the current group.

        Returns None if a request lacks a page and no request may be preempted yet.
        """
        rows = []
        for request in sorted(self.running.values(), key=lambda r: r.queue_key):
            if request.slot in self.prefilling or self.group_of(request) != self.group:
                continue
            count = min(steps, request.slot_end - 1 - request.num_computed_tokens)
            if count <= 0:
                continue
            if not self._grow_pages_or_preempt(request, request.num_computed_tokens + count, is_drained):
                if not is_drained:
                    return None
                continue
            self.tables.advance_windows(
                request.pages, request.num_computed_tokens, request.num_computed_tokens + count
            )
            rows.append(ScheduledTokens(request, request.num_computed_tokens, count))
        return rows

    def _with_draft_tokens(self, scheduled: ScheduledTokens, draft_tokens: Sequence[int]) -> ScheduledTokens:
        """Return a decode row with as many draft tokens as its length and the free pages allow.

        No request is preempted for them.
        """
        request = scheduled.request
        count = min(len(draft_tokens), scheduled.request.slot_end - 2 - scheduled.start)
        while count > 0 and not self.tables.grow(request.pages, scheduled.start + 1 + count):
            count -= 1
        if count <= 0:
            return scheduled
        self.tables.advance_windows(request.pages, scheduled.start, scheduled.start + 1 + count)
        return ScheduledTokens(request, scheduled.start, 1 + count, tuple(draft_tokens[:count]))

    def _grow_pages_or_preempt(self, request: Request, tokens: int, is_drained: bool) -> bool:
        """Allocate pages for a request's first `tokens` tokens; returns True if it has them.

        Once steps are settled, requests behind it are preempted for pages.
        """
        while not self.tables.grow(request.pages, tokens):
            if not is_drained:
                return False
            victim = max(
                self.config.requests_in_shard(shard_number(request.pages), self.running),
                key=lambda r: r.queue_key,
            )
            self.preempt(victim)
            if victim is request:
                return False
        return True
