"""The scheduler and the page pool under the real engine, over a device that keeps its pages in a
dictionary."""

import heapq
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from duetto import SamplingParams
from duetto.kvcache.names import extend
from duetto.kvcache.pages import Batch
from duetto.kvcache.tables import GONE, window_pages
from duetto.sampling.sample import Sampled, Scores
from duetto.serve.engine.engine import MAX_FAILURES, Engine
from duetto.serve.engine.guessing import Speculation
from duetto.serve.engine.request import Request
from duetto.serve.engine.scheduler import Limits
from duetto.serve.programs.classes import Classes
from duetto.serve.programs.compile import Arguments
from duetto.serve.programs.shapes import Shape, Sizes
from duetto.serve.programs.step import Output, Seat
from duetto.serve.speculation.controller import Controller

VOCAB = 13
BROKEN = jax.errors.JaxRuntimeError


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The fake model: a hash of the history that it sees."""
    return zlib.crc32(np.array([seed, *tokens], np.int32).tobytes()) % VOCAB


def fake_score(position: int, token: int) -> float:
    return float(100 * position + token)


pytestmark = pytest.mark.usefixtures("unchecked")  # the programs are fakes, and so is what they take


class Params(NamedTuple):
    embed: jax.Array


@dataclass
class Donated:
    """What a program consumes: it can be taken once."""

    value: Any
    taken: bool = False

    def take(self) -> Any:
        assert not self.taken, "a program was given what another has consumed"
        self.taken = True
        return self.value


@dataclass
class Slot:
    """One seat as serve/programs/step.py's Slots has it."""

    seat: Seat
    last: int = -1
    live: bool = True
    history: list[int] | None = None  # what load_history gave, and what was sampled since


class Cell(NamedTuple):
    position: int
    token: int
    phase: str
    long: bool


@dataclass
class Pages:
    cells: dict[tuple[int, int, int], Cell] = field(default_factory=dict)  # by group, page and offset
    broken: bool = False


@dataclass
class Later:
    """A result that is still on its way: reading it is noted, and fails if a step before it has failed."""

    value: np.ndarray
    read: Callable[[], None]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.read()
        return self.value


class FakePrograms:
    """Programs without a device, with donation, failures, and a log of what was dispatched and read."""

    count, seconds = 0, 0.0

    def __init__(self, sizes: Sizes, windows: tuple[int | None, ...], boundary: int | None):
        self.sizes, self.windows, self.boundary = sizes, windows, boundary
        target = SimpleNamespace(vocab_size=VOCAB)
        self.config = SimpleNamespace(target=target, windows=windows, boundary=boundary)
        self.fail: str | None = None
        self.log: list[tuple[str, int]] = []
        self.ran: list[tuple[Shape, list[tuple[int, int, int]]]] = []  # rows as (slot, start, count)

    def empty(self, params: Any) -> Arguments:
        self.pages = Pages()
        return Arguments(params, cast(Any, Donated(self.pages)), cast(Any, Donated({})))

    def empty_batch(self, shape: Shape, empty_slot: int) -> Batch:
        B, T, M = shape.rows, shape.tokens, self.sizes.table_width
        tokens, tables = (
            np.full((B, T), -1, np.int32),
            tuple(np.full((B, M), -1, np.int32) for _ in self.windows),
        )
        slot = np.full(B, empty_slot, np.int32)
        return Batch(tokens, np.zeros(B, np.int32), np.zeros(B, np.int32), tables, slot)

    def seat(self, slots: Donated, slot: np.int32, new: Seat) -> Donated:
        return Donated(slots.take() | {int(slot): Slot(new)})

    def load_history(self, slots: Donated, slot, tokens, prompt_len, total_len, bias) -> Donated:
        table = slots.take()
        table[int(slot)].history = tokens[:total_len].tolist()
        return Donated(table)

    def run(self, shape: Shape, arguments: Any, batch: Batch) -> tuple[Donated, Donated, Output]:
        pages, slots = arguments.cache.take(), arguments.slots.take()
        self._note(shape, batch)
        fail, self.fail = self.fail, None
        if fail == "dispatch":
            raise BROKEN("INTERNAL: the fake device has failed")
        if fail == "interrupt":
            raise KeyboardInterrupt
        pages.broken = pages.broken or fail == "read"
        width = 1 if shape.phase == "prefill" else shape.tokens
        token, logprob = np.full((shape.rows, width), -1, np.int32), np.zeros((shape.rows, width))
        step = self._verified if shape.phase == "verify" else self._column
        for column in range(width):
            for row, position, drawn in step(shape, pages, slots, batch, column):
                token[row, column], logprob[row, column] = drawn, fake_score(position, drawn)
        prompt = self._prompt_scores(batch, pages) if shape.phase == "prefill" else None
        output = Output(Sampled(*self._later(pages, token, logprob)), prompt)
        return Donated(pages), Donated(slots), output

    def _note(self, shape: Shape, batch: Batch) -> None:
        assert batch.tokens.shape == (shape.rows, shape.tokens) and batch.count.max() <= shape.tokens
        rows = zip(batch.slot.tolist(), batch.start.tolist(), batch.count.tolist(), strict=True)
        self.log.append(("dispatch", len(self.ran)))
        self.ran.append((shape, [row for row in rows if row[2] > 0]))

    def _column(
        self, shape: Shape, pages: Pages, slots: dict[int, Slot], batch: Batch, column: int
    ) -> Iterator[tuple[int, int, int]]:
        """One step of all rows, writes before reads; gives (row, position, token) of every token that is
        emitted."""
        awake = [
            row for row in range(shape.rows) if batch.count[row] > column and slots[int(batch.slot[row])].live
        ]
        ends = {}
        for row in awake:
            slot, first = slots[int(batch.slot[row])], int(batch.start[row]) + column
            stop = int(batch.count[row]) if shape.phase == "prefill" else column + 1
            for position, token in enumerate(batch.tokens[row, column:stop].tolist(), first):
                cell = Cell(position, slot.last if token < 0 else token, shape.phase, self._is_long(slot))
                for g in range(len(self.windows)):
                    pages.cells[self._place(batch, g, row, position)] = cell
            ends[row] = first, first + stop - column
        for row in awake:
            slot, (first, end) = slots[int(batch.slot[row])], ends[row]
            tokens: list[int] = []
            for query in range(first, end):
                tokens, *_ = [self._read(pages, batch, g, row, query, slot) for g in range(len(self.windows))]
            if end >= slot.seat.known:
                yield row, end, self._emit(slot, tokens, end)

    def _verified(
        self, shape: Shape, pages: Pages, slots: dict[int, Slot], batch: Batch, column: int
    ) -> Iterator[tuple[int, int, int]]:
        """Column of a verification: all tokens are written before the first, and a row goes on while its
        guesses are right."""
        if column == 0:
            self._going = [r for r in range(shape.rows) if batch.count[r] and slots[int(batch.slot[r])].live]
            for row in self._going:
                slot, start = slots[int(batch.slot[row])], int(batch.start[row])
                for position, token in enumerate(batch.tokens[row, : batch.count[row]].tolist(), start):
                    known = slot.last if token < 0 else token
                    cell = Cell(position, known, "decode", self._is_long(slot))
                    for g in range(len(self.windows)):
                        pages.cells[self._place(batch, g, row, position)] = cell
        for row in list(self._going):
            slot, query = slots[int(batch.slot[row])], int(batch.start[row]) + column
            tokens, *_ = [self._read(pages, batch, g, row, query, slot) for g in range(len(self.windows))]
            drawn = -1
            if query + 1 >= slot.seat.known:
                drawn = self._emit(slot, tokens, query + 1)
                yield row, query + 1, drawn
            if column + 1 >= batch.count[row] or drawn != batch.tokens[row, column + 1] or not slot.live:
                self._going.remove(row)

    def _is_long(self, slot: Slot) -> bool:
        return self.boundary is not None and slot.seat.end - 1 > self.boundary

    def _place(self, batch: Batch, g: int, row: int, position: int) -> tuple[int, int, int]:
        page = int(batch.page_tables[g][row, position // self.sizes.page_size])
        assert 0 <= page < self.sizes.pages[g], f"position {position} has no page"
        return g, page, position % self.sizes.page_size

    def _read(self, pages: Pages, batch: Batch, g: int, row: int, query: int, slot: Slot) -> list[int]:
        """The tokens that a query sees in a group."""
        first = max(0, query + 1 - (self.windows[g] or query + 1))
        cells = [pages.cells[self._place(batch, g, row, position)] for position in range(first, query + 1)]
        for position, cell in enumerate(cells, first):
            assert cell.position == position and cell.token >= 0, f"{cell} where position {position} is read"
            assert cell.long == self._is_long(slot)
        return [cell.token for cell in cells]

    def _emit(self, slot: Slot, tokens: list[int], end: int) -> int:
        """What serve/programs/step.py's `emit` does for one row: sample, and fall asleep at a stop token or
        the end."""
        token = next_token(tokens, int(slot.seat.knobs.seed))
        if slot.history is not None:
            assert slot.history[-len(tokens) :] == tokens, "the sampler looks back on other tokens"
            slot.history.append(token)
        slot.last, slot.live = token, token not in slot.seat.knobs.stop_ids and end + 1 < slot.seat.end
        return token

    def _prompt_scores(self, batch: Batch, pages: Pages) -> Scores:
        B, T = batch.tokens.shape
        following = np.roll(batch.tokens, -1, axis=1)
        scores = [[fake_score(batch.start[b] + i + 1, following[b, i]) for i in range(T)] for b in range(B)]
        return Scores(*self._later(pages, np.array(scores)))

    def _later(self, pages: Pages, *arrays: np.ndarray) -> list[Any]:
        """The arrays, and ranks and alternatives that nobody looks at."""
        broken, step = pages.broken, len(self.ran) - 1

        def read() -> None:
            self.log.append(("read", step))
            if broken:
                raise BROKEN("INTERNAL: the fake device had failed")

        shape = arrays[0].shape
        rest = np.zeros(shape, np.int32), np.zeros((*shape, 1), np.int32), np.zeros((*shape, 1))
        return [Later(x, read) for x in (*arrays, *rest)]


class Halfright:
    """A drafter that knows the fake model, and is wrong after a number of tokens that their hash decides."""

    def __init__(self, sight: int | None):
        self.sight, self.texts = sight, {}

    def begin(self, request: Request, prompt: Sequence[int]) -> None:
        assert request not in self.texts
        self.texts[request] = list(prompt)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        self.texts[request] += tokens

    def guess(self, request: Request, k: int) -> list[int]:
        text = self.texts[request]
        assert text == request.tokens, "the drafter has seen other tokens"
        right, guesses = next_token(text, 99) % (k + 2), []
        for i in range(min(k, next_token(text, 98))):
            seen = [*text, *guesses]
            token = next_token(seen[-self.sight :] if self.sight else seen, request.seed)
            guesses.append(token if i < right else (token + 1) % VOCAB)
        return guesses

    def end(self, request: Request) -> None:
        del self.texts[request]


class Zeros:
    """A drafter that knows nothing and guesses all the same."""

    def begin(self, request: Request, prompt: Sequence[int]) -> None: ...
    def extend(self, request: Request, tokens: Sequence[int]) -> None: ...
    def end(self, request: Request) -> None: ...

    def guess(self, request: Request, k: int) -> list[int]:
        return [0] * k


class Fickle:
    """A controller that takes each number of guesses in turn, and does not always ask."""

    def __init__(self, k: int):
        self.ks, self.turn, self.asked = (0, k), 0, 0

    def choose(self, rows: int, offered: Sequence[int]) -> int:
        self.turn += 1
        return self.ks[self.turn % 3 > 0]

    def asks(self, rows: int) -> bool:
        self.asked += 1
        return self.asked % 7 < 5

    def judged(self, offered: int, accepted: int) -> None: ...
    def timed(self, rows: int, k: int | None, seconds: float) -> None: ...


def speculate(guesses: int, adaptive: bool, sight: int | None) -> Speculation:
    speculation = Speculation(Halfright(sight), guesses)
    if adaptive:
        speculation.controller, speculation.sizes = cast(Any, Fickle(guesses)), [1, 2, 4, 8]
    return speculation


class StopsAfter:
    """A text in which a stop string appears after some tokens: the host alone knows."""

    def __init__(self, tokens: int):
        self.left, self.stop_hit = tokens, None

    def push(self, ids: list[int], below_min: int = 0) -> None:
        self.left -= len(ids)
        self.stop_hit = "END" if self.left <= 0 else None

    def finish(self) -> None:
        pass


def start(
    *,
    pages: int = 64,
    page_size: int = 4,
    seats: int = 4,
    budget: int = 8,
    chunk: int = 8,
    decode_steps: int = 1,
    rows: int = 1,
    width: int = 4,
    same_bits: bool = True,
    caching: bool = True,
    max_model_len: int = 48,
    windows: tuple[int | None, ...] = (None,),
    boundary: int | None = None,
    guesses: int = 0,
    adaptive: bool = False,
) -> tuple[Engine, FakePrograms]:
    """An engine over a fake device; `rows` prompts share a prefill, a call decodes `width` rows."""
    longest, work = min(max_model_len, pages * page_size), max(budget, decode_steps, guesses) + 1

    def count(window: int | None) -> int:
        if window is None:
            return pages
        one = min(window_pages(window, work, page_size), -(-longest // page_size))
        return max(one, min(pages, one * seats))

    sizes = Sizes(longest, seats, tuple(map(count, windows)), page_size)
    programs = FakePrograms(sizes, windows, boundary)
    prefill = {Shape("prefill", 1, 2), Shape("prefill", 1, chunk), Shape("prefill", rows, 2)}
    decode = {Shape("decode", w, t) for w in (1, width) for t in (1, decode_steps)}
    verify = {Shape("verify", 1, guesses + 1), Shape("verify", width, 2)} if guesses else set()
    classes = Classes(tuple(sorted(prefill)), tuple(sorted(decode)), same_bits, tuple(sorted(verify)))
    limits = Limits(seats, budget, 2, decode_steps, guesses)
    speculation = speculate(guesses, adaptive, windows[0]) if guesses else None
    state = programs.empty(Params(jnp.zeros((2, 2))))
    return Engine(cast(Any, programs), classes, state, limits, caching, speculation), programs


def ask(
    prompt: Sequence[int],
    max_tokens: int = 4,
    arrival: int = 0,
    *,
    priority: int = 0,
    stop_ids: tuple[int, ...] = (),
    text: StopsAfter | None = None,
    **params: Any,
) -> Request:
    chosen = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        id=str(arrival),
        prompt=list(prompt),
        params=chosen,
        seed=chosen.seed or 0,
        end=len(prompt) + max_tokens,
        stop_ids=stop_ids,
        text=cast(Any, text),
        priority=priority,
        arrival=arrival,
    )


def expected(
    request: Request, stop_after: int | None = None, sight: int | None = None
) -> tuple[list[int], str]:
    """The outputs that the hash gives for a request of which it sees the last tokens, and why they end."""
    tokens = list(request.prompt)
    while len(tokens) < request.end:
        tokens.append(next_token(tokens[-sight:] if sight else tokens, request.seed))
        if tokens[-1] in request.stop_ids or len(tokens) - len(request.prompt) == stop_after:
            return tokens[len(request.prompt) :], "stop"
    return tokens[len(request.prompt) :], "length"


def run(engine: Engine, most: int = 500) -> None:
    """Step until nothing is left to do."""
    for _ in range(most):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"unfinished after {most} steps")


def prompt_of(family: int, length: int, own: int = 0) -> list[int]:
    """A prompt of a family: all begin alike, and their last `own` tokens differ."""
    shared = np.random.default_rng(family).integers(0, VOCAB, length).tolist()
    return [*shared[: length - own], *((t + 1 + family) % VOCAB for t in shared[length - own :])]


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
    )
    def begin(self, size: int, tokens: int, **options: Any) -> None:
        if options["guesses"]:
            options["decode_steps"] = 1
        options |= {"page_size": size, "pages": -(-tokens // size), "max_model_len": 24}
        self.engine, self.programs = start(**options)
        self.options = options
        self.asked: list[tuple[Request, int | None]] = []
        self.book: dict[bytes, tuple[tuple[int, ...], bool]] = {}

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 20),
        own=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
        stops=st.booleans(),
        stop_after=st.one_of(st.none(), st.integers(1, 8)),
        options=st.fixed_dictionaries(
            {},
            optional={
                "logprobs": st.just(0),
                "prompt_logprobs": st.just(0),
                "presence_penalty": st.just(1.0),
            },
        ),
    )
    def arrive(self, family, length, own, max_tokens, n, priority, stops, stop_after, options) -> None:
        longest = self.engine.sizes.max_model_len
        prompt = prompt_of(family, min(length, longest - 1), min(own, length, longest - 1))
        for seed in range(n):
            arrival, room = len(self.asked), longest - len(prompt)
            text = None if stop_after is None else StopsAfter(stop_after)
            extra = {"priority": priority, "stop_ids": (0, 1) if stops else (), "text": text, "seed": seed}
            request = ask(prompt, min(max_tokens, room), arrival, **extra, **options)
            self.asked.append((request, stop_after))
            self._enter_names(request, stop_after)
            self.engine.submit(request)

    def _enter_names(self, request: Request, stop_after: int | None) -> None:
        root, W = self.engine.scheduler.root, self.engine.sizes.page_size
        if root is not None:
            tokens = request.prompt + self._expected(request, stop_after)[0]
            for long, start in ((False, root), (True, root + b"long")):
                names: list[bytes] = []
                extend(names, tokens, len(tokens) // W, W, start)
                self.book |= {name: (tuple(tokens[: (i + 1) * W]), long) for i, name in enumerate(names)}

    def _expected(self, request: Request, stop_after: int | None) -> tuple[list[int], str]:
        return expected(request, stop_after, self.options["windows"][0])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._advance()

    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        left = [request for request, _ in self.asked if not request.finished]
        if left:
            self.engine.abort(left[which % len(left)])
            self._check_books()

    @precondition(lambda self: self.programs.fail is None and self.engine._failures < MAX_FAILURES - 1)
    @rule(how=st.sampled_from(["dispatch", "read", "interrupt"]))
    def fail(self, how: str) -> None:
        self.programs.fail = how

    def teardown(self) -> None:
        bound = 10 + 5 * sum(request.end for request, _ in self.asked if not request.finished)
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self._advance()
        assert not self.engine.has_work, f"unfinished after {bound} steps without arrivals"
        assert self.engine.tables.occupancy == 0 and not any(self.engine.tables.reserved)
        for request, stop_after in self.asked:
            self._check_result(request, *self._expected(request, stop_after))

    def _advance(self) -> None:
        left = sorted((request for request, _ in self.asked if not request.finished), key=lambda r: r.rank)
        lengths = {request: len(request.tokens) for request in left}
        seated = {r: (r.computed, r.preemptions) for r in self.engine.scheduler.running.values()}
        failures = self.engine._failures
        try:
            touched = self.engine.step()
        except KeyboardInterrupt:
            touched = []
        self._check_books()
        if self.engine._failures <= failures:
            assert set(touched) == {r for r in left if len(r.tokens) > lengths[r]}
            self._check_order(left, seated)

    def _check_order(self, left: list[Request], seated: dict[Request, tuple[int, int]]) -> None:
        """Whoever is first in line goes on, and nobody is admitted before another who waits in front of
        him."""
        if left and left[0] in seated:
            first = left[0]
            verified = any(work.request is first for ran in self.engine._flight for work in ran.rows)
            goes_on = first.slot is not None and (first.computed > seated[first][0] or verified)
            assert first.finished or self._crossed(first) or goes_on
        running = self.engine.scheduler.running.values()
        new = [r for r in running if r not in seated or r.preemptions > seated[r][1]]
        waiting = [r for r in left if not r.finished and r.slot is None and not self._crossed(r)]
        assert not new or not waiting or max(r.rank for r in new) < min(r.rank for r in waiting)

    def _crossed(self, request: Request) -> bool:
        """Whether a request has just grown beyond the boundary, and is computed anew."""
        return len(request.tokens) == (self.options["boundary"] or -2) + 1

    def _check_books(self) -> None:
        scheduler, tables = self.engine.scheduler, self.engine.tables
        assert sorted([*scheduler.free_slots, *scheduler.running]) == list(range(self.options["seats"]))
        owners: dict[tuple[int, int], list[tuple[Request, int]]] = defaultdict(list)
        for slot, request in scheduler.running.items():
            assert request.slot == slot and not request.finished
            for g, pages in enumerate(request.pages):
                assert request.computed <= len(pages) * self.engine.sizes.page_size
                most = tables.most[g]
                assert most is None or sum(page != GONE for page in pages) <= most
                for i, page in enumerate(pages):
                    owners[g, page].append((request, i))
            self._check_contents(request)
        queue = {request for _, request in scheduler.waiting if not request.finished}
        assert queue | set(scheduler.running.values()) == {r for r, _ in self.asked if not r.finished}
        assert all(r.slot is None and not r.pages and r.computed == 0 for r in queue)
        for g, pool in enumerate(tables.pools):
            assert pool.references == [len(owners[g, page]) for page in range(pool.pages)]
            assert pool.free + sum(count > 0 for count in pool.references) == pool.pages
        for (g, page), those in owners.items():
            if len(those) > 1 and page != GONE:
                self._check_shared(g, page, those)
        self._check_names()

    def _check_contents(self, request: Request) -> None:
        """A request's pages hold its tokens; outputs come from decode unless prefill writes the same bits."""
        W = self.engine.sizes.page_size
        known = range(min(request.computed, len(request.tokens) - 1))
        for g, pages in enumerate(request.pages):
            for position in (p for p in known if pages[p // W] != GONE):
                cell = self.programs.pages.cells[g, pages[position // W], position % W]
                assert (cell.position, cell.token) == (position, request.tokens[position])
                phase = "prefill" if position < len(request.prompt) else "decode"
                assert self.options["same_bits"] or cell.phase == phase

    def _check_shared(self, g: int, page: int, owners: list[tuple[Request, int]]) -> None:
        """Two requests own a page only where it is full, named, and after the same tokens for both."""
        W = self.engine.sizes.page_size
        assert page in self.engine.tables.pools[g]._name_of
        texts = {tuple(request.tokens[: (i + 1) * W]) for request, i in owners}
        assert len(texts) == 1 and len(texts.pop()) == (owners[0][1] + 1) * W

    def _check_names(self) -> None:
        """What is found under a name has been written with the tokens of that name, in the phase that may
        share it."""
        W, pools = self.engine.sizes.page_size, self.engine.tables.pools
        named = [(g, *entry) for g, pool in enumerate(pools) for entry in pool._page_of.items()]
        assert self.options["caching"] or not named
        for g, name, page in named:
            tokens, long = self.book[name]
            for offset, token in enumerate(tokens[-W:]):
                cell = self.programs.pages.cells[g, page, offset]
                assert (cell.position, cell.token, cell.long) == (len(tokens) - W + offset, token, long)
                assert self.options["same_bits"] or cell.phase == "prefill"

    def _check_result(self, request: Request, outputs: list[int], reason: str) -> None:
        assert request.outputs == outputs[: len(request.outputs)]
        assert request.finish_reason == "abort" or (request.outputs, request.finish_reason) == (
            outputs,
            reason,
        )
        assert 0 <= request.cached < len(request.prompt) and request.cached % self.engine.sizes.page_size == 0
        if not self.options["caching"] or request.params.prompt_logprobs is not None:
            assert request.cached == 0
        scores = [fake_score(i, token) for i, token in enumerate(request.tokens)]
        if request.params.logprobs is not None:
            assert request.scores.logprob == scores[len(request.prompt) :]
        if request.params.prompt_logprobs is not None:
            found = request.prompt_scores.logprob
            assert found == scores[1 : 1 + len(found)]
            assert request.finish_reason == "abort" or len(found) == len(request.prompt) - 1


TestServing = Serving.TestCase
TestServing.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=120,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)


# ------------------------------------------------------------ one property at a time


def test_decode_never_starves_behind_prompts():
    engine, programs = start(budget=4, chunk=4, pages=64, decode_steps=3)
    writers = [ask(prompt_of(i, 5), 30, i) for i in range(2)]
    for request in writers:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    for arrival in range(2, 14):
        engine.submit(ask(prompt_of(arrival, 16), 1, arrival))
        running = engine.scheduler.running.values()
        ready = {r.slot for r in running if len(r.prompt) <= r.computed < r.end - 1}
        before = len(programs.ran)
        engine.step()
        rows = {phase: [] for phase in ("prefill", "decode")}
        for shape, works in programs.ran[before:]:
            rows[shape.phase] += works
        assert {writer.slot for writer in writers} <= ready <= {slot for slot, _, _ in rows["decode"]}
        assert 1 <= sum(count for _, _, count in rows["prefill"]) <= 4
        assert all(count == 1 for _, _, count in rows["decode"])  # several would make the prompt wait
    run(engine)


def test_the_prompt_of_the_first_in_line_is_read_first():
    engine, programs = start(budget=4, chunk=4)
    engine.submit(ask(prompt_of(0, 20), 1, 0, priority=1))
    engine.step()
    urgent = ask(prompt_of(1, 8), 2, 1, priority=0)
    engine.submit(urgent)
    engine.step()
    assert programs.ran[-1][1] == [(urgent.slot, 0, 4)]
    run(engine)


def test_next_step_is_dispatched_before_the_last_is_read():
    engine, programs = start()
    engine.submit(ask(prompt_of(0, 6), 8))
    run(engine)
    first_read = {}
    for at, (event, step) in enumerate(programs.log):
        if event == "read":
            first_read.setdefault(step, at)
    assert len(programs.ran) == 8 == len(first_read)
    for step in range(7):
        assert programs.log.index(("dispatch", step + 1)) < first_read[step]


def test_preempted_request_returns_to_its_place():
    engine, _ = start(pages=8, seats=3, max_model_len=28)
    requests = [ask(prompt_of(i, 7), 16, i) for i in range(4)]
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.preemptions:
        engine.step()
    queue = [r for _, r in sorted(engine.scheduler.waiting, key=lambda entry: entry[0])]
    assert queue == [requests[2], requests[3]]  # the last that ran, before the one that has never run
    finished = []
    while engine.has_work:
        engine.step()
        finished += [r for r in requests if r.finished and r not in finished]
    assert finished == requests
    assert all((r.outputs, r.finish_reason) == expected(r) for r in requests)


@pytest.mark.parametrize("same_bits", [True, False])
def test_preempted_request_computes_nothing_that_is_still_there(same_bits):
    engine, programs = start(pages=8, page_size=4, seats=2, same_bits=same_bits)
    first, second = ask(prompt_of(0, 8), 16, 0), ask(prompt_of(1, 8), 16, 1)
    for request in (first, second):
        engine.submit(request)
    while not second.preemptions:
        engine.step()
    engine.abort(first)
    known, before = len(second.tokens), len(programs.ran)
    run(engine)
    starts = [start for _, works in programs.ran[before:] for _, start, _ in works]
    # a full page of the prompt or, where their bits agree, of the outputs; its last pages went to the first
    # request
    assert min(starts) >= 4 and known > 8
    assert second.outputs == expected(second)[0]


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_outputs_are_found_by_name_where_bits_agree(same_bits, page_size, decode_steps):
    engine, _ = start(page_size=page_size, decode_steps=decode_steps, same_bits=same_bits)
    first = ask(prompt_of(0, 5), 14, 0)
    engine.submit(first)
    run(engine)
    again = ask([*first.tokens, 1], 2, 1)
    engine.submit(again)
    run(engine)
    written = (
        len(first.tokens) - 1 if same_bits else len(first.prompt)
    )  # the last token is sampled, never fed
    assert again.cached == written // page_size * page_size
    assert again.outputs == expected(again)[0]


def test_admission_leaves_a_spare_page_for_each_running_request():
    for pages, together in ((6, True), (5, False)):
        engine, _ = start(pages=pages, page_size=4, caching=False, max_model_len=20)
        requests = [ask(prompt_of(0, 8), 3, 0), ask(prompt_of(1, 12), 3, 1)]  # two pages and three
        for request in requests:
            engine.submit(request)
        engine.step()
        assert [r.slot is not None for r in requests] == [True, together]
        run(engine)
        assert [r.outputs for r in requests] == [expected(r)[0] for r in requests]


def test_admission_counts_found_pages_that_would_leave_the_free_list():
    engine, _ = start(pages=8, page_size=4, max_model_len=32)
    engine.submit(ask(prompt_of(0, 17), 1, 0))
    run(engine)
    runner, again = ask(prompt_of(1, 9), 8, 1), ask(prompt_of(0, 17), 1, 2)
    engine.submit(runner)
    engine.step()
    free = engine.tables.pools[0].free
    engine.submit(again)
    engine.step()
    assert free == 5 and again.slot is None  # five pages and a spare are wanted, four of them named and free
    run(engine)
    assert again.outputs == expected(again)[0] and again.cached > 0


def test_several_decode_steps_while_no_prompt_can_start():
    engine, programs = start(pages=6, page_size=4, decode_steps=4, max_model_len=24)
    engine.submit(ask(prompt_of(0, 8), 12, 0))
    engine.submit(ask(prompt_of(1, 20), 2, 1))
    run(engine)
    decodes = [works[0][2] for shape, works in programs.ran if shape.phase == "decode"]
    assert decodes[:2] == [4, 4]


def test_work_of_a_step_does_not_grow_with_the_queue():
    def opcodes(waiting: int) -> int:
        engine, _ = start(seats=2, pages=16)
        for arrival in range(2 + waiting):
            engine.submit(ask(prompt_of(0, 6), 8, arrival))
        for _ in range(3):
            engine.step()
        assert len(engine.scheduler.waiting) == waiting
        return count_opcodes(lambda: engine.scheduler.plan(settled=False), "scheduler.py")

    assert opcodes(3) == opcodes(3000) > 100


def count_opcodes(call: Callable[[], Any], file: str) -> int:
    """Bytecode instructions that a call executes in one source file."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(file):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_aborting_the_whole_queue_touches_no_entry_twice(monkeypatch):
    engine, _ = start(seats=1)
    requests = [ask(prompt_of(0, 6), 4, arrival) for arrival in range(200)]
    for request in requests:
        engine.submit(request)
    engine.step()
    pops, pop = [], heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: pops.append(1) or pop(heap))
    for request in requests[:50:-1] + requests[1:50]:
        engine.abort(request)
    run(engine)
    assert len(pops) <= 202 and not engine.scheduler.waiting
    assert {r.finish_reason for r in requests[:51] if r not in requests[1:50]} == {"length"}
    assert all(r.finish_reason == "abort" and not r.outputs for r in requests[1:50] + requests[51:])


def test_a_short_prompt_costs_a_whole_row_of_the_budget():
    engine, programs = start(budget=6, chunk=4, rows=3, seats=4)
    for arrival in range(4):
        engine.submit(ask(prompt_of(arrival, 1), 1, arrival))
    engine.step()
    assert [len(works) for _, works in programs.ran] == [3]  # rows of two tokens that share a call


def test_a_scored_prompt_takes_a_call_for_each_chunk():
    engine, programs = start(budget=4, chunk=4)
    engine.submit(ask(prompt_of(0, 10), 1, prompt_logprobs=0))
    run(engine)
    assert [works for _, works in programs.ran] == [[(0, 0, 4)], [(0, 3, 4)], [(0, 6, 4)]]


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_prompt_scores_are_complete_under_any_budget(budget):
    engine, _ = start(budget=budget, chunk=2)
    request = ask(prompt_of(0, 11), 3, prompt_logprobs=0)
    engine.submit(request)
    run(engine)
    assert request.prompt_scores.logprob == [fake_score(i, request.prompt[i]) for i in range(1, 11)]


@pytest.mark.parametrize("how", ["dispatch", "read"])
def test_a_device_that_always_fails_is_the_callers_error(how):
    engine, programs = start()
    request = ask(prompt_of(0, 6), 8)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    with pytest.raises(BROKEN):
        for _ in range(50):
            programs.fail = how
            engine.step()
    programs.fail = None
    run(engine)  # the request has kept its place, and the engine goes on
    assert request.outputs == expected(request)[0]


def test_parameters_change_once_the_requests_are_finished():
    engine, _ = start()
    token = next_token(prompt_of(0, 9), 0)
    request = ask(prompt_of(0, 9), 8, stop_ids=(token,))
    engine.submit(request)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.update_params(cast(Any, Params(jnp.ones((2, 2)))))
    while not request.finished:
        engine.step()
    assert engine.has_work  # the step that was dispatched before the stop token was read
    engine.update_params(cast(Any, Params(jnp.ones((2, 2)))))
    again = ask(prompt_of(0, 9), 2, 1)
    engine.submit(again)
    run(engine)
    assert again.cached == 0 and again.outputs == expected(again)[0]
    with pytest.raises(ValueError, match="embed is float32"):
        engine.update_params(cast(Any, Params(jnp.ones((2, 3)))))


# ------------------------------------------------------------ guesses


def test_guesses_save_steps_and_change_nothing():
    steps = {}
    for guesses in (0, 6):
        engine, programs = start(guesses=guesses)
        request = ask(prompt_of(1, 6), 30)
        engine.submit(request)
        run(engine)
        assert (request.outputs, request.finish_reason) == expected(request)
        steps[guesses] = len(programs.ran)
    assert steps[6] < steps[0]
    report = engine.report()["speculation"]
    assert 0 < report["accepted"] < report["drafted"] and report["tokens_per_pass"] > 1
    assert engine.speculation is not None and not engine.speculation.following


def test_guesses_are_shortened_by_the_end_and_by_free_pages():
    engine, programs = start(guesses=6, pages=3, page_size=4, max_model_len=12)
    request = ask(prompt_of(0, 6), 6)
    engine.submit(request)
    run(engine)
    assert request.outputs == expected(request)[0]
    assert all(start + count < request.end for _, works in programs.ran for _, start, count in works)
    assert engine.scheduler.preemptions == 0


def test_nobody_gives_way_to_a_guess():
    """One page is left beside two running requests: the first one's guesses take it, and the other's end with
    its page."""
    engine, programs = start(guesses=6, pages=5, page_size=4, seats=2, budget=16, max_model_len=16)
    assert engine.speculation is not None
    engine.speculation.drafter = cast(Any, Zeros())
    requests = [ask(prompt_of(i, 5), 9, i) for i in range(2)]
    for request in requests:
        engine.submit(request)
    while programs.ran[-1:] == [] or programs.ran[-1][0].phase != "verify":
        engine.step()
    rows = sorted(row for shape, works in programs.ran if shape.phase == "verify" for row in works)
    assert rows == [(0, 5, 7), (1, 5, 3)] and engine.scheduler.preemptions == 0
    run(engine)
    assert [r.outputs for r in requests] == [expected(r)[0] for r in requests]


def test_steps_overlap_again_while_guesses_do_not_pay():
    engine, programs = start(guesses=3)
    speculation = engine.speculation
    assert speculation is not None
    speculation.controller = Controller.of_times((0, 3), {(1, 0): 1.0, (1, 3): 100.0})
    speculation.sizes = [1]
    request = ask(prompt_of(0, 6), 30)
    engine.submit(request)
    run(engine)
    assert request.outputs == expected(request)[0]
    asked = sum(1 for shape, _ in programs.ran if shape.phase == "verify")
    reads = {step: at for at, (event, step) in reversed(list(enumerate(programs.log))) if event == "read"}
    overlapped = sum(programs.log.index(("dispatch", n + 1)) < reads[n] for n in range(len(programs.ran) - 1))
    assert asked == 0 and overlapped >= 25
