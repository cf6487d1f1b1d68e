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


class Work(NamedTuple):
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
    """What the scheduler may hand out: seats, prompt tokens a step, tokens of one chunk, decode steps of one dispatch."""

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
        steps = 1 if prompts or (self.waiting and self.free_slots) else self.limits.decode_steps
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
            self.name_pages(work.request, min(work.request.computed, self._prefill_end(work.request)))

    def name_pages(self, request: Request, tokens: int) -> None:
        """Name the full pages among a request's first `tokens` tokens, all of them known and computed."""
        if self.root is None:
            return
        full = tokens // self.page_size
        extend(request.names, request.tokens[:tokens], self.page_size, self.root)
        for page, name in zip(request.pages[:full], request.names[:full], strict=True):
            self.pool.name(page, name)

    def release(self, request: Request) -> None:
        """A running request ends or is preempted: its slot and pages are free at once, for steps run in order."""
        assert request.slot is not None
        self.pool.release(request.pages)
        del self.running[request.slot]
        heapq.heappush(self.free_slots, request.slot)
        request.pages, request.names, request.slot, request.computed = [], [], None, 0

    def abort(self, request: Request) -> None:
        """Forget a request wherever it is."""
        if request.slot is not None:
            self.release(request)
        else:
            self.waiting = [entry for entry in self.waiting if entry[1] is not request]
            heapq.heapify(self.waiting)

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
        while self.waiting and self.free_slots and self._fits(self.waiting[0][1]):
            _, request = heapq.heappop(self.waiting)
            request.slot = heapq.heappop(self.free_slots)
            self.running[request.slot] = request
            seated.append(request)
        return seated

    def _fits(self, request: Request) -> bool:
        """Take the pages of a request's known tokens, if they are there beside one spare page for each running request."""
        found = self._find(request)
        new = self._pages_for(len(request.tokens)) - len(found)
        spare = len(self.running) if self.running else 0
        if new + self.pool.idle(found) + spare > self.pool.free:
            return False
        self.pool.share(found)
        request.pages = found + self.pool.issue(new)
        request.computed = len(found) * self.page_size
        if not request.preemptions:
            request.cached = request.computed
        return True

    def _find(self, request: Request) -> list[int]:
        """Pages of the request's prompt that are already written; at least one token is left to compute."""
        if self.root is None or request.params.prompt_logprobs is not None:
            return []
        usable = request.tokens[
            : self._prefill_end(request) if request.generated else len(request.prompt) - 1
        ]
        extend(request.names, usable, self.page_size, self.root)
        return self.pool.find(request.names[: len(usable) // self.page_size])

    def _chunks(self) -> Iterable[Work]:
        """Chunks of prompts in order of rank, under the token budget."""
        budget = self.limits.max_prefill_tokens
        for request in sorted(self.running.values(), key=lambda r: r.rank):
            start = request.computed
            if request.params.prompt_logprobs is not None and 0 < start < len(request.prompt):
                start -= 1  # the score of a chunk's first token needs the hidden state before it
            count = min(self._prefill_end(request) - start, self.limits.chunk, budget)
            if count <= request.computed - start or not self._prompt_left(request):
                continue
            yield Work(request, start, count)
            budget -= count

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
            victim = max(self.running.values(), key=lambda r: r.rank)
            if settled:
                self.preempt(victim)
            if not settled or victim is request:
                return False
        if need > 0:
            request.pages += self.pool.issue(need)
        return True
