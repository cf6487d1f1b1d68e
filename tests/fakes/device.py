"""An engine's programs without a device: pages are kept in a dictionary, and the model is a hash of the
history."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from duetto.kvcache.pages import Batch
from duetto.sampling.sample import Sampled, Scores
from duetto.serve.runtime.compiled.lowering import StepArguments
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.executor import NullExecutor
from duetto.serve.runtime.steps.output import NO_PROMPT_INPUTS, Output, PromptInputs
from duetto.serve.runtime.steps.step import SlotContents

VOCAB = 13
BROKEN = jax.errors.JaxRuntimeError


def next_token(tokens: Sequence[int], seed: int) -> int:
    """The fake model: a hash of the history that it sees."""
    return zlib.crc32(np.array([seed, *tokens], np.int32).tobytes()) % VOCAB


def fake_score(position: int, token: int) -> float:
    return float(100 * position + token)


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
    """One seat as serve/runtime/steps/step.py's Slots has it."""

    seat: SlotContents
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


class FakeExecutor(NullExecutor):
    """Executor without a device, with donation, failures, and a log of what was dispatched and read."""

    def __init__(self, sizes: Sizes, windows: tuple[int | None, ...], boundary: int | None):
        target = SimpleNamespace(vocab_size=VOCAB)
        config = SimpleNamespace(
            target=target, windows=windows, longrope_boundary=boundary, prefill_alignment=1
        )
        super().__init__(config, sizes)
        self.windows, self.boundary = windows, boundary
        self.fail: str | None = None
        self.log: list[tuple[str, int]] = []
        self.ran: list[tuple[Shape, list[tuple[int, int, int]]]] = []  # rows as (slot, start, count)

    def fresh_arguments(self, params: Any, failure: BaseException | None = None) -> StepArguments:
        self.pages = Pages()
        return StepArguments(params, Donated(self.pages), Donated({}))

    def rows(self, shape: Shape) -> int:
        """Rows of all shards."""
        return self.sizes.shards * shape.rows

    def shard(self, batch: Batch, row: int) -> int:
        return row * self.sizes.shards // len(batch.slot)

    def slot(self, batch: Batch, row: int) -> int:
        """A row's seat among those of all shards."""
        assert 0 <= batch.slot[row] < self.sizes.max_num_seqs
        return self.shard(batch, row) * self.sizes.max_num_seqs + int(batch.slot[row])

    def assign_slot(self, slots: Donated, slot: np.int32, contents: SlotContents) -> Donated:
        return Donated(slots.take() | {int(slot): Slot(contents)})

    def load_history(self, slots: Donated, *history: Any) -> Donated:
        slot, tokens, _, total_len, _ = history
        table = slots.take()
        table[int(slot)].history = tokens[:total_len].tolist()
        return Donated(table)

    def run(
        self, shape: Shape, arguments: Any, batch: Batch, prompt_inputs: PromptInputs = NO_PROMPT_INPUTS
    ) -> tuple[Donated, Donated, Output]:
        pages, slots = arguments.cache.take(), arguments.slots.take()
        self._note(shape, batch)
        fail, self.fail = self.fail, None
        if fail == "dispatch":
            raise BROKEN("INTERNAL: the fake device has failed")
        if fail == "interrupt":
            raise KeyboardInterrupt
        pages.broken = pages.broken or fail == "read"
        width = 1 if shape.phase == "prefill" else shape.tokens
        B = self.rows(shape)
        token, logprob = np.full((B, width), -1, np.int32), np.zeros((B, width))
        step = self._verified if shape.phase == "verify" else self._column
        for column in range(width):
            for row, position, drawn in step(shape, pages, slots, batch, column):
                token[row, column], logprob[row, column] = drawn, fake_score(position, drawn)
        prompt = self._prompt_scores(batch, pages, prompt_inputs["prompt"]) if prompt_inputs else None
        output = Output(Sampled(*self._later(pages, token, logprob)), prompt)
        return Donated(pages), Donated(slots), output

    def _note(self, shape: Shape, batch: Batch) -> None:
        assert batch.tokens.shape == (self.rows(shape), shape.tokens) and batch.count.max() <= shape.tokens
        rows = [row for row, count in enumerate(batch.count) if count > 0]
        self.log.append(("dispatch", len(self.ran)))
        told = [(self.slot(batch, row), int(batch.start[row]), int(batch.count[row])) for row in rows]
        self.ran.append((shape, told))

    def _column(
        self, shape: Shape, pages: Pages, slots: dict[int, Slot], batch: Batch, column: int
    ) -> Iterator[tuple[int, int, int]]:
        """One step of all rows, writes before reads; gives (row, position, token) of every token that is
        emitted."""
        awake = [
            row
            for row in range(self.rows(shape))
            if batch.count[row] > column and slots[self.slot(batch, row)].live
        ]
        ends = {}
        for row in awake:
            slot, first = slots[self.slot(batch, row)], int(batch.start[row]) + column
            stop = int(batch.count[row]) if shape.phase == "prefill" else column + 1
            for position, token in enumerate(batch.tokens[row, column:stop].tolist(), first):
                cell = Cell(position, slot.last if token < 0 else token, shape.phase, self._is_long(slot))
                for g in range(len(self.windows)):
                    pages.cells[self._place(batch, g, row, position)] = cell
            ends[row] = first, first + stop - column
        for row in awake:
            slot, (first, end) = slots[self.slot(batch, row)], ends[row]
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
            rows = [row for row in range(self.rows(shape)) if batch.count[row]]
            self._going = [row for row in rows if slots[self.slot(batch, row)].live]
            for row in self._going:
                slot, start = slots[self.slot(batch, row)], int(batch.start[row])
                for position, token in enumerate(batch.tokens[row, : batch.count[row]].tolist(), start):
                    known = slot.last if token < 0 else token
                    cell = Cell(position, known, "decode", self._is_long(slot))
                    for g in range(len(self.windows)):
                        pages.cells[self._place(batch, g, row, position)] = cell
        for row in list(self._going):
            slot, query = slots[self.slot(batch, row)], int(batch.start[row]) + column
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
        page, pages = int(batch.page_tables[g][row, position // self.sizes.page_size]), self.sizes.pages[g]
        assert 0 <= page < pages, f"position {position} has no page"
        return g, self.shard(batch, row) * pages + page, position % self.sizes.page_size

    def _read(self, pages: Pages, batch: Batch, g: int, row: int, query: int, slot: Slot) -> list[int]:
        """The tokens that a query sees in a group."""
        first = max(0, query + 1 - (self.windows[g] or query + 1))
        cells = [pages.cells[self._place(batch, g, row, position)] for position in range(first, query + 1)]
        for position, cell in enumerate(cells, first):
            assert cell.position == position and cell.token >= 0, f"{cell} where position {position} is read"
            assert cell.long == self._is_long(slot)
        return [cell.token for cell in cells]

    def _emit(self, slot: Slot, tokens: list[int], end: int) -> int:
        """What `emit` of serve/runtime/steps/step.py does for one row: sample, and fall asleep at a stop
        token or the end."""
        token = next_token(tokens, int(slot.seat.knobs.seed))
        if slot.history is not None:
            assert slot.history[-len(tokens) :] == tokens, "the sampler looks back on other tokens"
            slot.history.append(token)
        slot.last, slot.live = token, token not in slot.seat.knobs.stop_ids and end + 1 < slot.seat.end
        return token

    def _prompt_scores(self, batch: Batch, pages: Pages, following: np.ndarray) -> Scores:
        scores = np.full(following.shape, np.nan)
        for b, i in np.argwhere(following >= 0):
            assert i < batch.count[b]
            scores[b, i] = fake_score(batch.start[b] + i + 1, following[b, i])
        return Scores(*self._later(pages, scores))

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
