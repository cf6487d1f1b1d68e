"""Which tokens the next step computes. Plain Python over requests and pages; it never touches the device.

Continuous batching is Orca's (Yu et al., OSDI 2022), prefill in chunks beside decode Sarathi's (Agrawal et al., arXiv 2308.16369).
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..kvcache.names import extend
from ..kvcache.pool import PagePool
from .request import Request


@dataclass(frozen=True, slots=True)
class Work:
    """A request's tokens [start, start + count) are computed in this step."""

    request: Request
    start: int
    count: int


@dataclass
class Plan:
    """One step: requests to seat first, chunks of prompts, and rows of decode."""

    seats: list[Request] = field(default_factory=list)
    prefill: list[Work] = field(default_factory=list)
    decode: list[Work] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Limits(NamedTuple):
    """What the scheduler may hand out: seats, new prompt tokens a step, tokens of one chunk (2 or more), decode steps of
    one dispatch."""

    max_num_seqs: int
    max_prefill_tokens: int
    chunk: int
    decode_steps: int


class Scheduler:
    """First come, first served within a priority. A request holds a slot and its pages from admission to its end.

    Admission takes all pages that a request's known tokens need. When decode needs a page and none is free, the request
    that is last in line gives up its pages and waits again; the first in line always goes on, so everything finishes.
    `recompute_outputs` says that pages written by prefill and by decode have the same bits; otherwise what a preempted
    request had generated is fed through decode again, which writes the same bits as the first time.
    """

    def __init__(
        self, limits: Limits, pool: PagePool, page_size: int, root: bytes | None, recompute_outputs: bool
    ):
        self.limits, self.pool, self.page_size, self.root = limits, pool, page_size, root
        self.recompute_outputs = recompute_outputs
        self.waiting: list[tuple[tuple[int, int], Request]] = []
        self.running: dict[int, Request] = {}
        self.free_slots = list(range(limits.max_num_seqs))
        self.preemptions = 0

    def add(self, request: Request) -> None:
        heapq.heappush(self.waiting, (request.rank, request))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self, settled: bool) -> Plan | None:
        """The next step, or None where decode lacks a page: then the step in flight must be `settled` before others give way."""
        prompts = any(self._prompt_left(r) for r in self.running.values())
        steps = 1 if prompts or self._room() is not None else self.limits.decode_steps
        rows = self._decode(steps, settled)
        if rows is None:
            return None
        seats = self._admit()
        return Plan(seats, list(self._chunks()), rows)

    def dispatched(self, plan: Plan) -> None:
        """Take note that a plan's tokens are on their way; pages that prompts have filled can be found from now on."""
        for work in (*plan.prefill, *plan.decode):
            work.request.computed = work.start + work.count
        for work in plan.prefill:
            self.name_pages(work.request, work.start, work.request.computed)

    def name_pages(self, request: Request, since: int, tokens: int) -> None:
        """Name the pages that a request's tokens [since, tokens) have filled; its first `tokens` are known and computed."""
        if self.root is None:
            return
        full = tokens // self.page_size
        extend(request.names, request.tokens, full, self.page_size, self.root)
        for i in range(since // self.page_size, full):
            self.pool.name(request.pages[i], request.names[i])

    def release(self, request: Request) -> None:
        """A running request ends or is preempted: its slot and pages are free at once, for steps run in order."""
        assert request.slot is not None
        self.pool.release(request.pages)
        del self.running[request.slot]
        heapq.heappush(self.free_slots, request.slot)
        request.pages, request.names, request.slot, request.computed = [], [], None, 0

    def abort(self, request: Request) -> None:
        """Forget a finished request; one that waits leaves the queue when it is next in line, so aborting many is cheap."""
        if request.slot is not None:
            self.release(request)
        self._drop_finished()

    def _drop_finished(self) -> None:
        while self.waiting and self.waiting[0][1].finished:
            heapq.heappop(self.waiting)

    def preempt(self, request: Request) -> None:
        """Back into the queue, at its old place; its tokens are kept and its pages can still be found by name."""
        self.release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def _prefill_end(self, request: Request) -> int:
        """Tokens that prefill may compute: the prompt, and of generated tokens all but the last if that keeps the bits."""
        if self.recompute_outputs and len(request.tokens) > len(request.prompt):
            return max(len(request.prompt), len(request.tokens) - 1)
        return len(request.prompt)

    def _prompt_left(self, request: Request) -> int:
        return max(0, self._prefill_end(request) - request.computed)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _admit(self) -> list[Request]:
        seated = []
        while (found := self._room()) is not None:
            _, request = heapq.heappop(self.waiting)
            self._drop_finished()
            self.pool.share(found)
            request.pages = found + self.pool.issue(self._pages_for(len(request.tokens)) - len(found))
            request.computed = len(found) * self.page_size
            if not request.preemptions:
                request.cached = request.computed
            request.slot = heapq.heappop(self.free_slots)
            self.running[request.slot] = request
            seated.append(request)
        return seated

    def _room(self) -> list[int] | None:
        """The pages found for the request that is next in line, or None where it cannot be admitted now.

        It needs a slot, and the pages of its known tokens beside one spare page for each running request. It waits for a
        page of its prompt that a running request is about to write, rather than compute the same again.
        """
        if not self.waiting or not self.free_slots:
            return None
        request = self.waiting[0][1]
        found = self._find(request)
        if self._is_coming(request.names[len(found) : len(found) + 1]):
            return None
        new = self._pages_for(len(request.tokens)) - len(found)
        return found if new + self.pool.idle(found) + len(self.running) <= self.pool.free else None

    def _is_coming(self, names: list[bytes]) -> bool:
        """Whether one of the names is that of a page which a running request's prefill has yet to write."""
        prefilling = [r for r in self.running.values() if self._prompt_left(r)]
        return any(name in r.names[r.computed // self.page_size :] for name in names for r in prefilling)

    def _find(self, request: Request) -> list[int]:
        """Pages of the request's prompt that are already written; at least one token is left to compute."""
        if self.root is None or request.params.prompt_logprobs is not None:
            return []
        usable = self._prefill_end(request) if request.generated else len(request.prompt) - 1
        full = usable // self.page_size
        extend(request.names, request.tokens, full, self.page_size, self.root)
        return self.pool.find(request.names[:full])

    def _chunks(self) -> Iterable[Work]:
        """Chunks of prompts in order of rank, under the token budget."""
        budget = self.limits.max_prefill_tokens
        for request in sorted(self.running.values(), key=lambda r: r.rank):
            scored = request.params.prompt_logprobs is not None
            # the score of a chunk's first token needs the hidden state before it
            again = int(scored and 0 < request.computed < len(request.prompt))
            new = min(self._prompt_left(request), self.limits.chunk - again, budget)
            if new > 0:
                yield Work(request, request.computed - again, new + again)
                budget -= new

    def _decode(self, steps: int, settled: bool) -> list[Work] | None:
        """A row for every request whose prompt is computed; None where one lacks a page and nobody may be preempted yet."""
        rows = []
        for request in sorted(self.running.values(), key=lambda r: r.rank):
            if request.slot is None or self._prompt_left(request):
                continue
            count = min(steps, request.end - 1 - request.computed)
            if count <= 0:
                continue
            if not self._grow(request, request.computed + count, settled):
                if not settled:
                    return None
                continue
            rows.append(Work(request, request.computed, count))
        return rows

    def _grow(self, request: Request, tokens: int, settled: bool) -> bool:
        """Give a request the pages of its first `tokens` tokens, taken from those behind it in line if need be."""
        need = self._pages_for(tokens) - len(request.pages)
        while need > self.pool.free:
            if not settled:
                return False
            victim = max(self.running.values(), key=lambda r: r.rank)
            self.preempt(victim)
            if victim is request:
                return False
        if need > 0:
            request.pages += self.pool.issue(need)
        return True
