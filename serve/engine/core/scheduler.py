"""Scheduler: the tokens of the next step. Plain Python over requests and pages, which never touches the
device.

Continuous batching is Orca's (Yu et al., OSDI 2022), chunked prefill beside decode Sarathi's (Agrawal et al.,
arXiv 2308.16369).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from ....kvcache.page_hash import extend
from ....kvcache.sharded_tables import shard_of
from ....kvcache.tables import PageTables, Tables
from ...kv.offload.tiering import NoOffload, PageFinder
from ...options.checks import round_up
from ..lora.places import Places
from .admission import AdmissionReason, WaitingReasons
from .gathering import PrefillBatcher, fitting
from .plan import Guess, ScheduledTokens, SchedulerConfig, SchedulerOutput
from .request import Request


class Scheduler:
    """First come, first served within a priority. A request holds a slot and its pages from admission to its
    end.

    Admission takes all pages that a request's known tokens need. When decode needs a page and none is free,
    the request that is last in the queue's order is preempted: it releases its pages and waits again. The
    first in that order always goes on, so everything finishes.

    A sequence that grows beyond `boundary` tokens is preempted once: all of its keys change (longrope).

    recompute_outputs: pages written by prefill and by decode have the same bits. Otherwise the pages of
    decode have other names, and generated tokens of a preempted request that are not found are fed through
    decode again, which writes the same bits as the first time.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        tables: PageTables,
        root: bytes | None,
        recompute_outputs: bool,
        boundary: int | None = None,
        gathering: PrefillBatcher | None = None,
    ):
        self.limits, self.tables, self.page_size, self.root = limits, tables, tables.page_size, root
        self.recompute_outputs, self.boundary, self.gathering = recompute_outputs, boundary, gathering
        self.waiting: list[tuple[tuple[int, int], Request]] = []
        self.running: dict[int, Request] = {}  # by slot
        self.prefilling: dict[int, Request] = {}  # of these, with prompt tokens left to dispatch
        self.free_slots = list(range(limits.max_num_seqs))
        self.tiers: PageFinder = NoOffload(tables)
        self.places = Places(0)
        self.reasons = WaitingReasons()
        self._why: AdmissionReason | None = None  # of the head, in this step
        self.group = 0  # of slots, whose turn it is
        self.preemptions = self.aborted = 0  # aborted in the queue and not removed from it yet

    def add(self, request: Request) -> None:
        heapq.heappush(self.waiting, (request.rank, request))
        if self.gathering is not None:
            self.gathering.queued(request, len(self.waiting))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def decoding(self) -> int:
        """Requests of the group whose turn it is that decode: their prompts are computed, or on their way."""
        return self._decoding[self.group]

    @property
    def steps(self) -> int:
        """Decode steps of one dispatch while no prompt can start: one while prompts are prefilled, or while a
        grammar has to read each sampled token before the next is sampled."""
        is_read = any(request.constraint is not None for request in self.running.values())
        return 1 if self.prefilling or is_read else self.limits.steps_for(self.running)

    @property
    def most_flights(self) -> int:
        """Most steps in flight: one of each group that decodes, or of every group while prompts are
        prefilled."""
        groups = self.limits.groups
        return groups if groups == 1 or self.prefilling else max(1, len(self._decoding))

    @property
    def _decoding(self) -> Counter[int]:
        return Counter(slot % self.limits.groups for slot in self.running if slot not in self.prefilling)

    def group_of(self, request: Request) -> int | None:
        """Return the group of a request's slot: one group decodes while the next one's step is planned."""
        return None if request.slot is None else request.slot % self.limits.groups

    def next_turn(self) -> None:
        """Give the turn to the next group that decodes."""
        if (groups := self.limits.groups) > 1:
            turns, active = [(self.group + 1 + i) % groups for i in range(groups)], self._decoding
            self.group = next((group for group in turns if group in active), turns[0])

    def plan(self, settled: bool, guess: Guess | None = None) -> SchedulerOutput | None:
        """Return the next step, with decode of the group whose turn it is. None if that lacks a page: then
        the steps in flight must be `settled`, their results read, before a request is preempted.

        The group's must be settled too if `guess` is given.
        """
        most = self.admission_limit()
        rows = self._decode(1 if most else self.steps, settled)
        if rows is None:
            return None
        admitted = self.admit(most)
        chunks = list(self.chunks())
        if guess is not None:
            rows = [self._with_draft_tokens(work, g) for work, g in zip(rows, guess(rows), strict=True)]
        if any(work.guesses for work in rows):
            return SchedulerOutput(admitted, chunks, verify=rows)
        return SchedulerOutput(admitted, chunks, rows)

    def dispatched(self, plan: SchedulerOutput) -> None:
        """Record that a plan's tokens are on their way. Pages that prompts have filled can be found from now
        on.

        How many of its tokens a verified row has computed is known when its results are read.
        """
        for work in (*plan.prefill, *plan.decode):
            work.request.computed = work.start + work.count
        for work in plan.prefill:
            if work.request.slot is not None and not self._prompt_left(work.request):
                self.prefilling.pop(work.request.slot, None)
            self.name_pages(work.request, work.start, work.request.computed)
        if self.gathering is not None:
            self.gathering.dispatched(len(plan.admitted), len(self.running))

    def name_pages(self, request: Request, since: int, tokens: int) -> None:
        """Name the pages filled by a request's tokens [since, tokens), of which the first `tokens` are known
        and computed."""
        full = tokens // self.page_size
        if self.root is None or since // self.page_size == full:
            return
        names = self._extend_names(request, full)
        self.tables.name(request.pages, names, since // self.page_size, request.tokens, request.marks)

    def _extend_names(self, request: Request, pages: int) -> Sequence[bytes]:
        assert self.root is not None
        start = self.root + request.salt + (b"long" if self._is_long(request) else b"")
        prompt = None if self.recompute_outputs else len(request.prompt)
        extend(request.names, request.tokens, pages, self.page_size, start, prompt)
        return request.names[:pages]

    def _is_long(self, request: Request) -> bool:
        return self.boundary is not None and len(request.tokens) > self.boundary

    def release(self, request: Request) -> None:
        """Release the slot and the pages of a request that ends or is preempted. Steps run in order, so later
        ones may write the pages."""
        assert request.slot is not None
        self.tables.release(request.pages, request.end)
        self.places.release(request.adapter)
        del self.running[request.slot]
        self.prefilling.pop(request.slot, None)
        heapq.heappush(self.free_slots, request.slot)
        request.pages, request.names, request.slot, request.computed = [], [], None, 0
        self._drop_ticket(request)

    def drop_tickets(self) -> None:
        """Cancel all page fetches of waiting requests, which begin others when they are at the head."""
        for _, request in self.waiting:
            self._drop_ticket(request)

    def _drop_ticket(self, request: Request) -> None:
        self.tiers.drop(request.ticket)
        request.ticket = None

    def abort(self, request: Request) -> None:
        """Forget a finished request. Those in the queue are removed together once they are half of it, so
        that aborting many is cheap."""
        if request.slot is not None:
            self.release(request)
        else:
            self._drop_ticket(request)
            self.aborted += 1
        if 2 * self.aborted > len(self.waiting):
            self.waiting, self.aborted = [entry for entry in self.waiting if not entry[1].finished], 0
            heapq.heapify(self.waiting)
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self.waiting and self.waiting[0][1].finished:
            heapq.heappop(self.waiting)

    def preempt(self, request: Request) -> None:
        """Put a running request back into the queue at its old place. Its tokens are kept and its pages can
        still be found by name."""
        self.release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def _prefill_end(self, request: Request) -> int:
        """Return the tokens that prefill may compute: the prompt, and all but the last generated token if
        that keeps the bits."""
        if self.recompute_outputs and len(request.tokens) > len(request.prompt):
            return max(len(request.prompt), len(request.tokens) - 1)
        return len(request.prompt)

    def _prompt_left(self, request: Request) -> int:
        return max(0, self._prefill_end(request) - request.computed)

    def _reach(self, request: Request) -> int:
        if self.boundary is None or self._is_long(request):
            return request.end
        return min(request.end, self.boundary + 1)

    def _queued_tokens(self) -> list[int]:
        """Return the tokens to compute of the first prompts that fit a step. They are in the heap's order,
        nearly the queue's."""
        budget, row = self.limits.shards * self.limits.max_prefill_tokens, self.limits.row
        line = (request for _, request in self.waiting[: max(budget // row, 1)] if not request.finished)
        tokens = (self._prefill_end(r) - len(self._find(r)[0]) * self.page_size for r in line)
        return fitting(tokens, budget, row)

    def admission_limit(self) -> int:
        """Return how many requests may be admitted in this step, 0 if the head of the queue has to wait.

        Prefills are held back to be batched only while no prompt is being prefilled, which they could join,
        and while more requests wait than slots are free.
        """
        self._why = None
        if not self.waiting:
            return 0
        found = self._admissible(self.waiting[0][1])
        if isinstance(found, AdmissionReason):
            self._why = found
            return 0
        most = free = len(self.free_slots)
        if self.gathering is not None and not self.prefilling and len(self.waiting) > free:
            most = self.gathering.limit(free, len(self.running), self.steps, self._queued_tokens())
        self._why = AdmissionReason.PREFILL_BATCHING if most < free else AdmissionReason.NO_SLOT
        return most

    def admit(self, most: int) -> list[Request]:
        """Move at most `most` requests from the head of the queue to the running ones: find the prefix that
        is cached, check the budget, allocate pages and a slot. The first that does not fit ends it."""
        admitted = []
        while self.waiting and len(admitted) < most:
            request = self.waiting[0][1]
            found = self._admissible(request)
            if isinstance(found, AdmissionReason):
                self._why = found
                break
            heapq.heappop(self.waiting)
            self._drop_finished()
            self._allocate(request, found)
            admitted.append(request)
        if self.waiting and self._why is not None:
            self.reasons.note(self.waiting[0][1], self._why)
        return admitted

    def _admissible(self, request: Request) -> Tables | AdmissionReason:
        """Return the pages that are cached for the request at the head of the queue, in the best shard that
        has room for the others, or the reason why it waits.

        It needs a slot, a place for its adapter, and the pages of its known tokens beside one spare page for
        each running request; while pages are lent, those of all its tokens beside what running requests may
        take. It waits for a page of its prompt that a running request is about to compute, and for pages that
        come from a tier.
        """
        if not self.free_slots:
            return AdmissionReason.NO_SLOT
        if not self.places.fits(request.adapter):
            return AdmissionReason.ADAPTER
        names, loads = self.usable(request), self.limits.loads(self.running)
        if len(self.tables.shards) > 1:
            shards = self.tables.in_order(names, loads, self.limits.shard_seats)
        else:
            found, request.ticket = self.tiers.look(names, request.ticket)
            if found is None:
                return AdmissionReason.KV_TRANSFER
            shards = [found]
        for found in shards:
            if self._is_coming(names, found):
                return AdmissionReason.PREFIX_PENDING
            tokens, spare = len(request.tokens), loads[shard_of(found)]
            if self.tables.is_lending:
                tokens, spare = request.end, self.growth
            if self.tables.fits(found, tokens, request.end, spare):
                return found
        if self.tables.is_lending:
            return AdmissionReason.PAGES_LENT
        return AdmissionReason.NO_PAGES if len(shards) == len(loads) else AdmissionReason.SHARD_FULL

    def _allocate(self, request: Request, found: Tables) -> None:
        request.marks = self.tables.marks(request.names, found)
        request.pages = self.tables.admit(found, len(request.tokens), request.end)
        request.computed = len(found[0]) * self.page_size
        self.tiers.admit(found, request.names, request.tokens, request.pages, request.ticket)
        if not request.preemptions:
            request.cached = request.computed
        request.place = self.places.take(request.adapter)
        request.slot = self.limits.seat(self.free_slots, self.running, shard_of(request.pages))
        request.reach = self._reach(request)
        self.running[request.slot] = request
        if self._prompt_left(request):  # what was preempted may be found whole
            self.prefilling[request.slot] = request

    @property
    def growth(self) -> int:
        return sum(self.tables.growth(r.pages, r.end) for r in self.running.values())

    def _is_coming(self, names: Sequence[bytes], found: Tables) -> bool:
        """Return whether the prefill of a running request of the same shard has yet to write the first page
        that was not found."""
        page = len(found[0])
        if page >= len(names):
            return False
        prefilling = self.limits.of(shard_of(found), self.prefilling)
        return any(names[page] in r.names[r.computed // self.page_size :] for r in prefilling)

    def _find(self, request: Request) -> Tables:
        """Return the pages of a request's known tokens that are written; at least one token is left to
        compute."""
        return self.tiers.find(self.usable(request), request.ticket)

    def usable(self, request: Request) -> Sequence[bytes]:
        """Return the names of the pages that a waiting request can use if they are found: full pages, at
        least one token left to compute, and of a scored prompt none with tokens whose scores it lacks."""
        if self.root is None or request.is_whole:
            return []
        names = self._extend_names(request, (len(request.tokens) - 1) // self.page_size)
        if request.scored and request.unscored < len(request.prompt):
            return names[: (request.unscored - 1) // self.page_size]
        return names

    def chunks(self) -> Iterable[ScheduledTokens]:
        """Yield chunks of prompts in order of rank, within a shard's token budget; a row that is not full
        counts as full."""
        budget = [self.limits.max_prefill_tokens] * self.limits.shards
        for request in sorted(self.prefilling.values(), key=lambda r: r.rank):
            shard = shard_of(request.pages)
            new = min(self._prompt_left(request), budget[shard])
            if new > 0:
                work = ScheduledTokens(request, request.computed, new)
                self.tables.advance(request.pages, work.start, work.start + work.count, request.marks)
                yield work
                budget[shard] -= round_up(new, self.limits.row)

    def _decode(self, steps: int, settled: bool) -> list[ScheduledTokens] | None:
        """Return a row for every decoding request of the group; None if one lacks a page and no request may
        be preempted yet."""
        rows = []
        for request in sorted(self.running.values(), key=lambda r: r.rank):
            if request.slot in self.prefilling or self.group_of(request) != self.group:
                continue
            count = min(steps, request.reach - 1 - request.computed)
            if count <= 0:
                continue
            if not self._grow(request, request.computed + count, settled):
                if not settled:
                    return None
                continue
            self.tables.advance(request.pages, request.computed, request.computed + count)
            rows.append(ScheduledTokens(request, request.computed, count))
        return rows

    def _with_draft_tokens(self, work: ScheduledTokens, guesses: Sequence[int]) -> ScheduledTokens:
        """Return a row of decode with as many draft tokens as its length and the free pages allow. No request
        is preempted for them."""
        request, count = work.request, min(len(guesses), work.request.reach - 2 - work.start)
        while count > 0 and not self.tables.grow(request.pages, work.start + 1 + count):
            count -= 1
        if count <= 0:
            return work
        self.tables.advance(request.pages, work.start, work.start + 1 + count)
        return ScheduledTokens(request, work.start, 1 + count, tuple(guesses[:count]))

    def _grow(self, request: Request, tokens: int, settled: bool) -> bool:
        """Allocate the pages of a request's first `tokens` tokens, if need be by preempting requests behind
        it."""
        while not self.tables.grow(request.pages, tokens):
            if not settled:
                return False
            victim = max(self.limits.of(shard_of(request.pages), self.running), key=lambda r: r.rank)
            self.preempt(victim)
            if victim is request:
                return False
        return True
