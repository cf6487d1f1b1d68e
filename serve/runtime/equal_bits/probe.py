"""Keys and samples of compiled shapes on fixed texts, so that their bits can be compared.

A comparison takes many runs. Each method that runs programs is a generator that yields after every run, so
that an engine may serve between two of them.
"""

import hashlib
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ....kvcache.pages import Batch, KVCache
from ....kvcache.placement import whole
from ....kvcache.tables import Tables
from ....model.pair import Params, target_of, with_target
from ....model.recurrent.kinds import STATE
from ....model.weights.adapted import NO_ADAPTER, adapted, places_in, stacks_of
from ....sampling.params import NO_TOKEN, SamplingParams, knobs_row
from ...host.devices import time_calls
from ..compiled.batches import empty_batch, fill
from ..compiled.compile import Programs, StepArguments
from ..compiled.futures import PendingSample, arrived
from ..compiled.shapes import Canonical, Shape
from ..steps.scoring import NEVER
from ..steps.step import Output, Seat

REPEATS = 5  # runs of a shape that is timed
TEXTS = 64  # that a prefill is probed with, at most
NUMBERS = 1 << 20  # that shapes are compared by, if rounded to 16 or 8 bits: few show that sums differ
WHOLE_NUMBERS = 1 << 14  # and in 32 bits, where most show it
FEWEST_STEPS = 4  # of decode that are compared

T = TypeVar("T")
Runs = Generator[None, None, T]  # yields between two runs of programs


def finish(runs: Runs[T]) -> T:
    """Do all runs, one after the other."""
    while True:
        try:
            next(runs)
        except StopIteration as end:
            return end.value


class Written(NamedTuple):
    """Digest of a sequence's keys and values, and the log-probabilities of samples by the number of tokens
    before them."""

    digest: bytes
    scores: dict[int, bytes]


class Probe:
    """Runs shapes on fixed token sequences, in pages of a cache that are lent to it, and compares what they
    write and sample with the canonical shape of their phase.

    Between two runs the engine may have the cache: `take` and `give` pass it. The probe has slots of its own.
    It needs `needed` pages of each window, and has those of `lent`.

    serving: requests come meanwhile. Places for adapters differ, so that of all rows is the first, and it is
    compared as it was when the comparison began.
    """

    def __init__(
        self, programs: Programs, canonical: Canonical, shapes: Iterable[Shape], serving: bool = False
    ):
        self.programs, self.canonical, shapes = programs, canonical, list(shapes)
        places = places_in(programs.like.params)
        self._places = min(places, 1) if serving else places  # all of these hold the same
        self._own_terms, self._terms = serving and places > 0, None
        sizes, like = programs.sizes, programs.like
        self.page_size, self.pool, self.capacity = sizes.page_size, min(sizes.pages), sizes.max_num_seqs
        areas, least = [s.area for s in shapes if s.phase == "prefill"], FEWEST_STEPS
        wide = [s for s in shapes if s.phase != "prefill"]
        self.tokens = min(max(areas), self.page_size * min(self.pool, sizes.table_width))
        self.layers = programs.config.target.layers  # draft tokens may have any bits
        room = max(min(self.pool // self.capacity, sizes.table_width), 1)  # pages of a row of decode at most
        enough = -(-self._enough(like.cache) // canonical.decode.rows)
        least = max(least, *(s.tokens for s in wide))
        self.steps = min(max(enough, least), room * self.page_size, self.tokens)
        self.pages = -(-self.steps // self.page_size)  # of a row of decode
        widest = max(self._rows(s, 1) for s in wide)
        self.needed = max(widest * self.pages, -(-self.tokens // self.page_size))
        V = programs.config.target.vocab_size
        self.text = np.random.default_rng(0).integers(0, V, (TEXTS, self.tokens), dtype=np.int32)
        self.slots: Any = None  # Slots
        self.lent: Tables = []
        self._state: tuple[Params, Any] | None = None
        self._readers = self._compiled_readers(like.cache)
        self.forget()

    def forget(self) -> None:
        """Forget the results of the canonical shapes: other parameters are served."""
        self._written: dict[tuple[int, int], Written] = {}
        self._decoded: dict[bool, list[bytes]] = {}
        self._spoken: np.ndarray | None = None

    def take(self, params: Params, cache: Any) -> None:
        self._state = self._with_own_terms(params) if self._own_terms else params, cache

    def _with_own_terms(self, params: Params) -> Params:
        """The parameters with a copy of the adapters' arrays, which the engine changes in place."""
        target = target_of(params)
        if self._terms is None:
            copied = partial(jax.tree.map, lambda x: jax.device_put(np.array(x), x.sharding))
            self._terms = {path: copied(pair) for path, pair in stacks_of(target).items()}
        return with_target(params, adapted(target, self._terms))

    def give(self) -> Any:
        assert self._state is not None
        (_, cache), self._state = self._state, None
        return cache

    def rest(self) -> None:
        """Release the arrays on the device."""
        self._state = self.slots = None
        if self._terms is not None:  # the next copy is another one
            self._terms = None
            self.forget()

    # ------------------------------------------------------------ one run

    def _run(self, shape: Shape, batch: Batch) -> Output:
        assert self._state is not None
        params, cache = self._state
        slots = self._seated() if self.slots is None else self.slots
        cache, self.slots, out = self.programs.run(shape, StepArguments(params, cache, slots), batch)
        if isinstance(out, PendingSample):
            self.slots = out.draw(params, self.slots)
        self._state = params, cache
        return jax.tree.map(np.asarray, arrived(out))

    def _seated(self) -> Any:
        """Return slots with requests that do not end."""
        params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)
        own = self.programs.sizes.processors
        knobs = knobs_row(params, seed=0, stop_ids=(), prompt_len=0, processors=own)
        slots, places = self.programs.fresh_slots(), self._places
        for slot in range(self.capacity):
            own = np.int32(slot % places if places else NO_ADAPTER)
            new = Seat(np.int32(0), np.int32(2**31 - 1), np.int32(NEVER), knobs, own)
            slots = self.programs.seat(slots, np.int32(slot), new)
        return slots

    def _own(self, pages: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, " M"]]:
        """Return pages for each window, by their numbers among those lent."""
        return [np.asarray(lent, np.int32)[pages] for lent in self.lent]

    # ------------------------------------------------------------ prefill

    def prefill(self, shape: Shape, tokens: int, text: int = 0) -> Runs[Written]:
        """Run a prefill of a sequence's first tokens; returns what it wrote, with scores at the canonical
        one's ends of chunks."""
        pages = np.arange(-(-tokens // self.page_size), dtype=np.int32)
        scores = {}
        for first in range(0, tokens, shape.area):
            batch = empty_batch(self.programs.sizes, shape, self.capacity)
            starts = range(first, min(first + shape.area, tokens), shape.tokens)
            ends = [min(start + shape.tokens, tokens) for start in starts]
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                fill(batch, row, self.text[text, start:end], start, self._own(pages), 0)
            sampled = self._run(shape, batch).sampled
            has_sample = sampled.token[:, 0] != NO_TOKEN  # not all, if there are fewer slots than rows
            found = {
                end: sampled.logprob[row, 0].tobytes() for row, end in enumerate(ends) if has_sample[row]
            }
            scores |= {
                end: x
                for end, x in found.items()
                if end % self.canonical.prefill.tokens == 0 or end == tokens
            }
            yield
        return Written(self._digests(pages[None], tokens)[0], scores)

    def agrees(self, shape: Shape) -> Runs[bool]:
        """Return True if a shape writes and samples what the canonical one of its phase does, on as many
        texts as it takes to tell."""
        if shape in self.canonical:
            return True
        if shape.phase != "prefill":
            spoken = shape.phase == "verify"
            found, wanted = (yield from self.decode(shape, spoken)), (yield from self.decoded(spoken))
            return all(row == wanted[i % len(wanted)] for i, row in enumerate(found))
        tokens = min(shape.area, self.tokens)
        for text in range(min(TEXTS, -(-self._enough(self._cache) // tokens))):
            if not (yield from self._equal(shape, tokens, text)):
                return False
        return True

    def _enough(self, cache: KVCache) -> int:
        """Return the tokens that leave enough numbers in the cache to tell shapes apart."""
        pools = list(self._pools(cache))
        narrow = any(pool.dtype.itemsize < 4 for pool, _ in pools)
        each = sum(numbers_of_token(pool, self._is_state(window)) for pool, window in pools)
        return -(-(NUMBERS if narrow else WHOLE_NUMBERS) // each)

    def _equal(self, shape: Shape, tokens: int, text: int) -> Runs[bool]:
        found, wanted = (yield from self.prefill(shape, tokens, text)), self._written.get((tokens, text))
        if wanted is None:
            wanted = yield from self.prefill(self.canonical.prefill, tokens, text)
            self._written[tokens, text] = wanted
        return found.digest == wanted.digest and found.scores.items() <= wanted.scores.items()

    # ------------------------------------------------------------ decode and verification

    def decode(self, shape: Shape, spoken: bool = False) -> Runs[list[bytes]]:
        """Return the digest of each row after `steps` tokens; rows take the sequences in turn. If decode
        itself has `spoken` the texts, draft tokens are right."""
        text = (yield from self._speak()) if spoken else self.text
        scores = [b""] * self._rows(shape)
        for start in range(0, self.steps, shape.tokens):
            count = min(shape.tokens, self.steps - start)
            logprob = self._run(shape, self._batch(shape, text, start, count)).sampled.logprob
            scores = [score + logprob[row, :count].tobytes() for row, score in enumerate(scores)]
            yield
        pages = np.stack([self._pages(row) for row in range(len(scores))])
        return [own + score for own, score in zip(self._digests(pages, self.steps), scores, strict=True)]

    def decoded(self, spoken: bool = False) -> Runs[list[bytes]]:
        """Return the digests of the canonical decode on the same texts."""
        if spoken not in self._decoded:
            self._decoded[spoken] = yield from self.decode(self.canonical.decode, spoken)
        return self._decoded[spoken]

    def same_bits(self) -> Runs[bool]:
        """Return True if prefill writes what decode does."""
        for i, row in enumerate((yield from self.decoded())):
            written = yield from self.prefill(self.canonical.prefill, self.steps, i % self.sequences)
            if row[:16] != written.digest:
                return False
        return True

    def _speak(self) -> Runs[Int[np.ndarray, "texts tokens"]]:
        """Return the texts, continued after their first token by the canonical decode."""
        text = self._spoken
        if text is None:
            text, decode, n = self.text.copy(), self.canonical.decode, self.sequences
            for step in range(1, self.steps):
                token = self._run(decode, self._batch(decode, text, step - 1, 1)).sampled.token
                text[:n, step] = np.resize(token[: self._rows(decode), 0], n)
                yield
            self._spoken = text
        return text

    def seconds(self, shape: Shape, tokens: int) -> Runs[float]:
        """Return the best time of a step of as many rows of `tokens` tokens as fit, whose draft tokens are
        right."""
        text = yield from self._speak()
        batch = self._batch(shape, text, 0, min(tokens, self.steps), tokens)
        found = []
        for _ in range(REPEATS):
            jax.block_until_ready(self._cache)  # an engine's own step may still run
            found += time_calls(lambda: self._run(shape, batch), 1)
            yield
        return min(found)

    @property
    def sequences(self) -> int:
        """Number of texts that rows of decode take in turn."""
        return min(self.canonical.decode.rows, TEXTS)

    def _rows(self, shape: Shape, tokens: int = 0) -> int:
        return min(shape.rows_of(tokens or shape.tokens), self.pool, self.capacity)

    def _batch(
        self, shape: Shape, text: Int[np.ndarray, "texts tokens"], start: int, count: int, tokens: int = 0
    ) -> Batch:
        """Return a batch of rows of `tokens` tokens, by default T, in pages of their own, with the sequences'
        tokens [start, start + count)."""
        batch = empty_batch(self.programs.sizes, shape, self.capacity)
        for row in range(self._rows(shape, tokens)):
            own = text[row % self.sequences, start : start + count]
            fill(batch, row, own, start, self._own(self._pages(row)), row)
        return batch

    def _pages(self, row: int) -> Int[np.ndarray, " M"]:
        return np.arange(row * self.pages, (row + 1) * self.pages, dtype=np.int32)

    # ------------------------------------------------------------ what was written

    @property
    def _cache(self) -> KVCache:
        assert self._state is not None
        return arrived(self._state[1])

    def _pools(self, cache: KVCache) -> Iterator[tuple[Any, int]]:
        """Yield the pools whose layers' bits matter, each with the number of its window."""
        windows = self.programs.config.windows
        for pools in (cache.k, cache.v, cache.states):
            for layer, pool in zip(self.layers, pools, strict=False):
                window = STATE if pools is cache.states or layer.keys is None else layer.keys.window
                for own in jax.tree.leaves(pool):
                    yield own, windows.index(window)

    def _digests(self, rows: Int[np.ndarray, "rows M"], tokens: int) -> list[bytes]:
        """Return a hash of each sequence's keys and values in all layers: its first tokens, in pages of its
        own."""
        found, pages = [hashlib.blake2b(digest_size=16) for _ in rows], self._own(rows.reshape(-1))
        for pool, window in self._pools(self._cache):
            read = self._read(pool, pages[window])
            numbers = read.reshape(read.shape[0], len(rows), -1, *read.shape[3:])
            last = None if self._is_state(window) else tokens
            for row, own in enumerate(found):
                own.update(numbers[:, row, :last].tobytes())
        return [own.digest() for own in found]

    def _is_state(self, window: int) -> bool:
        return self.programs.config.windows[window] == STATE

    def _compiled_readers(self, cache: KVCache) -> dict[Any, Any]:
        """Compile, for each kind of pool, a program that copies the pages of a row or of a prefill out of
        it."""
        self._at_once = max(self.pages, min(self.needed, SMALLEST_READ))
        pages = jax.ShapeDtypeStruct((self._at_once,), jnp.int32)
        kinds = {kind(pool): pool for pool, _ in self._pools(cache)}
        return {
            name: jax.jit(read_pages, out_shardings=whole(pool.sharding)).lower(pool, pages).compile()
            for name, pool in kinds.items()
        }

    def _read(
        self, pool: Shaped[Array, "K P W ..."], pages: Int[np.ndarray, " M"]
    ) -> Shaped[np.ndarray, "K M W ..."]:
        """Copy pages of a pool, in one piece."""
        n, reader = self._at_once, self._readers[kind(pool)]
        parts = [np.resize(pages[i : i + n], n) for i in range(0, len(pages), n)]
        return np.concatenate([np.asarray(reader(pool, part)) for part in parts], axis=1)[:, : len(pages)]


SMALLEST_READ = 8  # pages


def numbers_of_token(pool: Any, is_state: bool) -> int:
    """Return the numbers that tell a token from others in a pool; of a state one for each dimension of a
    head."""
    return pool.shape[0] * (pool.shape[-1] if is_state else prod(pool.shape[3:]))


def read_pages(pool: Any, pages: Any) -> Any:
    return pool[:, pages]


def kind(pool: Any) -> Any:
    return pool.shape, str(pool.dtype), pool.sharding
