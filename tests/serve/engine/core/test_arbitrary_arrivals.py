"""The scheduler and the page pool under the real engine while requests come, go and fail in any order."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes.device import Cell, fake_score
from fakes.engine import StopsAfter, ask, expected, prompt_of, start
from fakes.tiers import PHASES, attach
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from duetto.kvcache.page_hash import extend_page_hashes
from duetto.kvcache.pool import PagePool
from duetto.kvcache.sharded_tables import shard_number
from duetto.kvcache.tables import NULL_PAGE, PageTables
from duetto.serve.engine.core.engine import MAX_FAILURES
from duetto.serve.engine.core.request import Request

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


class Serving(RuleBasedStateMachine):
    """Requests come, go and fail in any order, in engines of any size."""

    @initialize(
        size=st.sampled_from([1, 2, 4]),
        tokens=st.integers(6, 40),
        seats=st.integers(1, 5),
        budget=st.integers(1, 12),
        chunk=st.sampled_from([2, 4, 8]),
        decode_steps=st.integers(1, 4),
        rows=st.sampled_from([1, 3]),
        width=st.sampled_from([2, 4]),
        same_bits=st.booleans(),
        caching=st.booleans(),
        windows=st.sampled_from([(None,), (None, 3), (5,), (None, 2, 7)]),
        boundary=st.sampled_from([None, None, 9]),
        guesses=st.sampled_from([0, 0, 1, 3, 6]),
        adaptive=st.booleans(),
        tier=st.sampled_from([0, 0, 3, 9, 100]),
        loses=st.sampled_from([None, None, 1, 3]),
        late=st.sampled_from([False, False, False, True]),
        shards=st.sampled_from([1, 1, 2, 3]),
    )
    def begin(self, size: int, tokens: int, tier: int, loses: int | None, late: bool, **options: Any) -> None:
        if options["guesses"]:
            options["decode_steps"] = 1
        options |= {"page_size": size, "pages": -(-tokens // size), "max_model_len": 24}
        self.engine, self.executor = start(**options)
        tiered = tier and options["caching"] and options["shards"] == 1
        self.mover = attach(self.engine, self.executor, tier, loses, late) if tiered else None
        # seats cost nothing in half of the engines: nobody in line gets one before a shape is full
        cheap = 1e-9 if options["rows"] > 1 else 1.0
        self.engine.prefill_delayer._seconds = lambda s: s.area * (1.0 if s.phase == "prefill" else cheap)
        self.options = options
        self.asked: list[tuple[Request, int | None]] = []
        self.book: dict[bytes, tuple[tuple[int, ...], bool, int]] = {}

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 20),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        stops=st.booleans(),
        stop_after=st.one_of(st.none(), st.integers(1, 8)),
        score_from=st.integers(1, 20),
        patience=st.sampled_from([0.0, 1e-4, math.inf, math.inf]),
        options=st.fixed_dictionaries(
            {},
            optional={
                "logprobs": st.just(0),
                "prompt_logprobs": st.just(0),
                "presence_penalty": st.just(1.0),
            },
        ),
    )
    def arrive(
        self, family, length, own, max_tokens, n, priority, stops, stop_after, score_from, patience, options
    ) -> None:
        longest = self.engine.sizes.max_model_len
        prompt = prompt_of(family, min(length, longest - 1), min(own, length, longest - 1))
        for seed in range(n):
            arrival, room = len(self.asked), longest - len(prompt)
            text = None if stop_after is None else StopsAfter(stop_after)
            extra = {"priority": priority, "stop_ids": (0, 1) if stops else (), "text": text, "seed": seed}
            request = ask(prompt, min(max_tokens, room), arrival, **extra, **options)
            request.score_from = min(score_from, len(prompt))
            request.max_prefill_delay = patience
            self.asked.append((request, stop_after))
            self._enter_names(request, stop_after)
            self.engine.submit(request)

    def _enter_names(self, request: Request, stop_after: int | None) -> None:
        root, W = self.engine.scheduler.root_hash, self.engine.sizes.page_size
        if root is not None:
            tokens = request.prompt + self._expected(request, stop_after)[0]
            for long, start in ((False, root), (True, root + b"long")):
                names: list[bytes] = []
                prompt = len(request.prompt)
                extend_page_hashes(
                    names, tokens, len(tokens) // W, W, start, None if self.same_bits else prompt
                )
                texts = {name: tuple(tokens[: (i + 1) * W]) for i, name in enumerate(names)}
                self.book |= {name: (text, long, prompt) for name, text in texts.items()}

    @property
    def same_bits(self) -> bool:
        return self.options["same_bits"]

    def _expected(self, request: Request, stop_after: int | None) -> tuple[list[int], str]:
        return expected(request, stop_after, self.options["windows"][0])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._advance()

    @precondition(lambda self: self.mover is not None)
    @rule(jobs=st.integers(1, 9))
    def move(self, jobs: int) -> None:
        self.mover.work(jobs)
        self._check_tier()

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        left = [request for request, _ in self.asked if not request.is_finished]
        if left:
            self.engine.abort(left[which % len(left)])
            self._check_books()

    @precondition(lambda self: self._may_fail())
    @rule(how=st.sampled_from(["dispatch", "read", "interrupt"]))
    def fail(self, how: str) -> None:
        self.executor.fail = how

    def _may_fail(self) -> bool:
        """Whether no failure is under way, and one more is not the caller's."""
        pending = self.executor.fail is not None or self.executor.pages.broken
        return not pending and self.engine.num_failures < MAX_FAILURES - 1

    def teardown(self) -> None:
        bound = 10 + 5 * sum(request.end for request, _ in self.asked if not request.is_finished)
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self._advance()
            if self.mover is not None:
                self.mover.work()
        assert not self.engine.has_work, f"unfinished after {bound} steps without arrivals"
        assert self.engine.tables.occupancy == 0
        assert not any(sum(tables.reserved_pages) for tables in self.shards)
        for request, stop_after in self.asked:
            self._check_result(request, *self._expected(request, stop_after))

    def _advance(self) -> None:
        left = sorted(
            (request for request, _ in self.asked if not request.is_finished), key=lambda r: r.queue_key
        )
        lengths = {request: len(request.tokens) for request in left}
        seated = {r: (r.num_computed_tokens, r.preemptions) for r in self.engine.scheduler.running.values()}
        failures = self.engine.num_failures
        try:
            touched = self.engine.step()
        except KeyboardInterrupt:
            touched = []
        self._check_books()
        if self.engine.num_failures <= failures:
            assert set(touched) == {r for r in left if len(r.tokens) > lengths[r]}
            self._check_order(left, seated)

    def _check_order(self, left: list[Request], seated: dict[Request, tuple[int, int]]) -> None:
        """Whoever is first in line goes on, and nobody is admitted before another who waits in front of
        him."""
        if left and left[0] in seated:
            first = left[0]
            verified = any(work.request is first for work in self.engine.in_flight_steps.rows)
            goes_on = first.slot is not None and (first.num_computed_tokens > seated[first][0] or verified)
            assert first.is_finished or self._crossed(first) or goes_on
        running = self.engine.scheduler.running.values()
        new = [r for r in running if r not in seated or r.preemptions > seated[r][1]]
        waiting = [r for r in left if not r.is_finished and r.slot is None and not self._crossed(r)]
        assert not new or not waiting or max(r.queue_key for r in new) < min(r.queue_key for r in waiting)

    def _crossed(self, request: Request) -> bool:
        """Whether a request has just grown beyond the boundary, and is computed anew."""
        return len(request.tokens) == (self.options["boundary"] or -2) + 1

    def _check_books(self) -> None:
        scheduler = self.engine.scheduler
        seats = self.engine.sizes.num_slots
        assert sorted([*scheduler.free_slots, *scheduler.running]) == list(range(seats))
        owners: dict[tuple[int, int], list[tuple[Request, int]]] = defaultdict(list)
        for slot, request in scheduler.running.items():
            assert request.slot == slot and not request.is_finished
            for g, pages in enumerate(request.pages):
                assert request.num_computed_tokens <= len(pages) * self.engine.sizes.page_size
                most = self.shards[0].max_pages[g]
                assert most is None or sum(page != NULL_PAGE for page in pages) <= most
                for i, page in enumerate(pages):
                    owners[g, self.place(request, g, page)].append((request, i))
            self._check_contents(request)
        queue = {request for _, request in scheduler.waiting if not request.is_finished}
        assert queue | set(scheduler.running.values()) == {r for r, _ in self.asked if not r.is_finished}
        assert all(r.slot is None and not r.pages and r.num_computed_tokens == 0 for r in queue)
        for g, first, pool in self.pools():
            places = range(first, first + pool.num_pages)
            assert pool.references == [len(owners[g, page]) for page in places]
            assert pool.num_free + sum(count > 0 for count in pool.references) == pool.num_pages
        for (g, page), those in owners.items():
            if len(those) > 1 and page != NULL_PAGE:
                self._check_shared(g, page, those)
        self._check_names()

    @property
    def shards(self) -> Sequence[PageTables]:
        return self.engine.tables.shards

    def pools(self) -> Iterator[tuple[int, int, PagePool]]:
        """Of each group and shard the pool, and the number of its first page among those of all shards."""
        for i, tables in enumerate(self.shards):
            yield from ((g, i * pool.num_pages, pool) for g, pool in enumerate(tables.pools))

    def place(self, request: Request, g: int, page: int) -> int:
        """A request's page among those of all shards."""
        assert shard_number(request.pages) == (request.slot or 0) // self.engine.sizes.max_num_seqs
        return page if page == NULL_PAGE else shard_number(request.pages) * self.engine.sizes.pages[g] + page

    def _check_tier(self) -> None:
        """What a tier has of a name are the cells of that name."""
        W, (tier,) = self.engine.sizes.page_size, self.mover.tier.tiers
        for key, content in tier.volatile_pages():
            cells = np.frombuffer(content, np.int32).reshape(W, 4).tolist()
            self._check_name(key[:-1], [Cell(p, t, PHASES[phase], bool(long)) for p, t, phase, long in cells])

    def _check_contents(self, request: Request) -> None:
        """A request's pages hold its tokens; outputs come from decode unless prefill writes the same bits."""
        W = self.engine.sizes.page_size
        known = range(min(request.num_computed_tokens, len(request.tokens) - 1))
        for g, pages in enumerate(request.pages):
            for position in (p for p in known if pages[p // W] != NULL_PAGE):
                cell = self.executor.pages.cells[
                    g, self.place(request, g, pages[position // W]), position % W
                ]
                assert (cell.position, cell.token) == (position, request.tokens[position])
                phase = "prefill" if position < len(request.prompt) else "decode"
                assert self.options["same_bits"] or cell.phase == phase

    def _check_shared(self, g: int, page: int, owners: list[tuple[Request, int]]) -> None:
        """Two requests own a page only where it is full, named, and after the same tokens for both."""
        W = self.engine.sizes.page_size
        assert any(
            first + own == page for h, first, pool in self.pools() if h == g for own in pool._hash_by_page
        )
        texts = {tuple(request.tokens[: (i + 1) * W]) for request, i in owners}
        assert len(texts) == 1 and len(texts.pop()) == (owners[0][1] + 1) * W

    def _check_names(self) -> None:
        """What is found under a name has been written with the tokens of that name, in the phase that may
        share it."""
        W = self.engine.sizes.page_size
        named = [
            (g, name, first + page)
            for g, first, pool in self.pools()
            for name, page in pool.list_cached_pages()
        ]
        assert self.options["caching"] or not named
        for g, name, page in named:
            self._check_name(name, [self.executor.pages.cells[g, page, offset] for offset in range(W)])

    def _check_name(self, name: bytes, cells: list[Cell]) -> None:
        (tokens, long, prompt), W = self.book[name], len(cells)
        first = len(tokens) - W
        for position, (token, cell) in enumerate(zip(tokens[first:], cells, strict=True), first):
            assert (cell.position, cell.token, cell.long) == (position, token, long)
            assert self.same_bits or cell.phase == ("prefill" if position < prompt else "decode")

    def _check_result(self, request: Request, outputs: list[int], reason: str) -> None:
        assert request.output_tokens == outputs[: len(request.output_tokens)]
        assert request.finish_reason == "abort" or (request.output_tokens, request.finish_reason) == (
            outputs,
            reason,
        )
        assert (
            0 <= request.num_cached_tokens < len(request.prompt)
            and request.num_cached_tokens % self.engine.sizes.page_size == 0
        )
        if not self.options["caching"]:
            assert request.num_cached_tokens == 0
        scores = [fake_score(i, token) for i, token in enumerate(request.tokens)]
        if request.params.logprobs is not None:
            assert request.scores.logprob == scores[len(request.prompt) :]
        if request.params.prompt_logprobs is not None:
            found = request.prompt_scores.logprob
            assert found == scores[request.score_from : request.score_from + len(found)]
            assert request.finish_reason == "abort" or request.first_unscored == len(request.prompt)


class LongServing(Serving):
    """The same with more examples."""


SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
TestServing = Serving.TestCase
TestServing.settings = SETTINGS
TestLongServing = pytest.mark.full(LongServing.TestCase)
TestLongServing.settings = settings(SETTINGS, max_examples=120)
