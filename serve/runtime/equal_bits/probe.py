"""Keys and samples of compiled shapes on fixed texts, so that their bits can be compared."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ....kvcache.pages import Batch, KVCache
from ....kvcache.shardings import replicated_sharding
from ....kvcache.tables import SequenceTables
from ....model.recurrent.kinds import STATE_WINDOW
from ....model.weights.lora import NO_ADAPTER, num_lora_slots
from ....sampling.params import NO_TOKEN, SamplingParams, request_knobs
from ...host.devices import time_calls
from ..compiled.batch_arrays import empty_batch, fill_row
from ..compiled.futures import wait_result
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import StepArguments
from ..compiled.shapes import CanonicalShapes, Shape
from ..steps.output import Output
from ..steps.step import SlotContents

TIMED_RUNS = 5  # number of runs of a shape that is timed
MAX_TEXTS = 64  # number of texts that a prefill is probed with, at most
# Numbers of the cache that are compared, in 16 or 8 bits: rounding hides most differences.
NARROW_NUMBERS = 1 << 20
# Numbers of the cache that are compared, in 32 bits: most of them show a difference.
FLOAT32_NUMBERS = 1 << 14
MIN_DECODE_STEPS = 4  # number of steps of decode that are compared, at least
MIN_READ_PAGES = 8  # pages that a program copies, at least

T = TypeVar("T")


class ProbeResult(NamedTuple):
    """Result of a prefill, for comparison.

    digest: hash of the sequence's keys and values.
    scores: log-probabilities of samples, as bytes, by the number of tokens before them.
    """

    digest: bytes
    scores: dict[int, bytes]


class Probe:
    """Comparison of shapes with the canonical shape of their phase, by the keys that they write and the
    tokens that they sample.

    Shapes run on fixed token sequences, in pages of an engine's cache and in slots of their own. All methods
    that run shapes are called by the `work` of `run`.

    needed_pages: number of pages of each window that it needs.
    compared_tokens: number of tokens of a prefill that is compared.
    compared_steps: number of steps of decode that are compared; `pages_per_row` is the number of pages of a
    row of decode.
    """

    def __init__(self, executor: LocalExecutor, canonical: CanonicalShapes, shapes: Iterable[Shape]):
        self.executor, self.canonical, shapes = executor, canonical, list(shapes)
        self.programs = programs = executor.programs
        sizes, abstract = programs.sizes, programs.abstract_arguments
        self.page_size, self.pool, self.capacity = sizes.page_size, min(sizes.pages), sizes.max_num_seqs
        prefill_tokens, min_steps = [s.area for s in shapes if s.phase == "prefill"], MIN_DECODE_STEPS
        decode_shapes = [s for s in shapes if s.phase != "prefill"]
        self.compared_tokens = min(max(prefill_tokens), self.page_size * min(self.pool, sizes.table_width))
        self.layers = programs.config.target.layers  # without the drafter's: draft tokens may have any bits
        # pages of a row of decode at most
        row_pages = max(min(self.pool // self.capacity, sizes.table_width), 1)
        enough_steps = -(-self._min_compared_tokens(abstract.cache) // canonical.decode_shape.rows)
        min_steps = max(min_steps, *(s.tokens for s in decode_shapes))
        self.compared_steps = min(
            max(enough_steps, min_steps), row_pages * self.page_size, self.compared_tokens
        )
        self.pages_per_row = -(-self.compared_steps // self.page_size)
        max_rows = max(self._num_rows(s, 1) for s in decode_shapes)
        self.needed_pages = max(max_rows * self.pages_per_row, -(-self.compared_tokens // self.page_size))
        V = programs.config.target.vocab_size
        self.text = np.random.default_rng(0).integers(0, V, (MAX_TEXTS, self.compared_tokens), dtype=np.int32)
        self._arguments: StepArguments | None = None
        self._pages: list[Int[np.ndarray, " n"]] = []
        self._page_readers = self._compile_readers(abstract.cache)
        self.clear_results()

    def clear_results(self) -> None:
        """Forget the results of the canonical shapes: other parameters are served."""
        self._prefill_results: dict[tuple[int, int], ProbeResult] = {}
        self._decode_digests: dict[bool, list[bytes]] = {}
        self._continued_texts: np.ndarray | None = None

    def run(
        self, arguments: StepArguments, pages: SequenceTables, work: "Callable[[Probe], T]"
    ) -> tuple[T, StepArguments]:
        """Do work that runs shapes with a step's parameters, in `pages` of each window of its cache, which
        are overwritten. Returns the result, and the step's arguments."""
        self._arguments = replace(arguments, slots=self._make_slots())
        self._pages = [np.asarray(numbers, np.int32) for numbers in pages]
        try:
            result = work(self)
            return result, replace(arguments, cache=self._arguments.cache)
        finally:  # after a failure two caches may not fit
            self._arguments = None

    # ------------------------------------------------------------ one run

    def _run_step(self, shape: Shape, batch: Batch) -> Output:
        """Run a step; returns its output on the host."""
        assert self._arguments is not None
        cache, slots, out = self.executor.run(shape, self._arguments, batch)
        self._arguments = replace(self._arguments, cache=cache, slots=slots)
        return jax.tree.map(np.asarray, wait_result(out))

    def _make_slots(self) -> Any:
        """Return slots, all with requests that do not end."""
        params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)
        processors = self.programs.sizes.processors
        knobs = request_knobs(params, seed=0, stop_ids=(), prompt_len=0, processors=processors)
        slots = self.programs.small_programs.fresh_slots()
        lora_slots = num_lora_slots(self.programs.abstract_arguments.params)  # all hold the same
        for slot in range(self.capacity):
            lora_slot = np.int32(slot % lora_slots if lora_slots else NO_ADAPTER)
            contents = SlotContents(np.int32(0), np.int32(2**31 - 1), knobs, lora_slot)
            slots = self.executor.assign_slot(slots, np.int32(slot), contents)
        return slots

    def _page_numbers(self, pages: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, " M"]]:
        """Return pages of each window, by their indices into the borrowed pages."""
        return [numbers[pages] for numbers in self._pages]

    # ------------------------------------------------------------ prefill

    def run_prefill(self, shape: Shape, tokens: int, text: int = 0) -> ProbeResult:
        """Prefill the first `compared_tokens` tokens of a text. The result has scores where a chunk of the
        canonical shape would end."""
        pages = np.arange(-(-tokens // self.page_size), dtype=np.int32)
        scores = {}
        for first in range(0, tokens, shape.area):
            batch = empty_batch(self.programs.sizes, shape, self.capacity)
            starts = range(first, min(first + shape.area, tokens), shape.tokens)
            ends = [min(start + shape.tokens, tokens) for start in starts]
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                fill_row(batch, row, self.text[text, start:end], start, self._page_numbers(pages), 0)
            output = self._run_step(shape, batch)
            samples = output.sample_indices(shape.rows, self.programs.sizes.shards)
            sampled = output.sampled
            end_scores = {
                end: sampled.logprob[i, 0].tobytes()
                for end, i in zip(ends, samples or range(len(ends)), strict=False)
                if i >= 0 and sampled.token[i, 0] != NO_TOKEN  # with fewer slots than rows, some have none
            }
            scores |= {
                end: x
                for end, x in end_scores.items()
                if end % self.canonical.prefill_shape.tokens == 0 or end == tokens
            }
        return ProbeResult(self._hash_pages(pages[None], tokens)[0], scores)

    def matches_canonical(self, shape: Shape) -> bool:
        """Return True if a shape writes and samples the same bits as the canonical shape of its phase, on
        enough texts to tell."""
        if shape in self.canonical:
            return True
        if shape.phase != "prefill":
            is_verify = shape.phase == "verify"
            digests = self.run_decode(shape, is_verify)
            expected = self.run_canonical_decode(is_verify)
            return all(row == expected[i % len(expected)] for i, row in enumerate(digests))
        tokens = min(shape.area, self.compared_tokens)
        for text in range(min(MAX_TEXTS, -(-self._min_compared_tokens(self._cache) // tokens))):
            if not self._matches_in_prefill(shape, tokens, text):
                return False
        return True

    def _min_compared_tokens(self, cache: KVCache) -> int:
        """Return the number of tokens whose keys and values are enough numbers to tell shapes apart."""
        pools = list(self._layer_pools(cache))
        is_narrow = any(pool.dtype.itemsize < 4 for pool, _ in pools)
        numbers_per_token = sum(values_per_token(pool, self._is_state(window)) for pool, window in pools)
        return -(-(NARROW_NUMBERS if is_narrow else FLOAT32_NUMBERS) // numbers_per_token)

    def _matches_in_prefill(self, shape: Shape, tokens: int, text: int) -> bool:
        """Return True if a prefill of a text has the same result as the canonical prefill."""
        result = self.run_prefill(shape, tokens, text)
        expected = self._prefill_results.get((tokens, text))
        if expected is None:
            expected = self.run_prefill(self.canonical.prefill_shape, tokens, text)
            self._prefill_results[tokens, text] = expected
        return result.digest == expected.digest and result.scores.items() <= expected.scores.items()

    # ------------------------------------------------------------ decode and verification

    def run_decode(self, shape: Shape, is_continued: bool = False) -> list[bytes]:
        """Run `compared_steps` tokens in each row; returns each row's digest and scores. Row i has text i
        modulo the number of texts.

        is_continued: use texts that the canonical decode has generated, so that all draft tokens are right.
        """
        text = self._continue_texts() if is_continued else self.text
        scores = [b""] * self._num_rows(shape)
        for start in range(0, self.compared_steps, shape.tokens):
            count = min(shape.tokens, self.compared_steps - start)
            logprob = self._run_step(shape, self._make_batch(shape, text, start, count)).sampled.logprob
            scores = [score + logprob[row, :count].tobytes() for row, score in enumerate(scores)]
        pages = np.stack([self._row_pages(row) for row in range(len(scores))])
        return [
            digest + score
            for digest, score in zip(self._hash_pages(pages, self.compared_steps), scores, strict=True)
        ]

    def run_canonical_decode(self, is_continued: bool = False) -> list[bytes]:
        """Return the digests and scores of the canonical decode, run once; `is_continued` as in
        `run_decode`."""
        if is_continued not in self._decode_digests:
            self._decode_digests[is_continued] = self.run_decode(self.canonical.decode_shape, is_continued)
        return self._decode_digests[is_continued]

    def does_prefill_match_decode(self) -> bool:
        """Return True if prefill writes the same bits as decode."""
        for i, row in enumerate(self.run_canonical_decode()):
            written = self.run_prefill(self.canonical.prefill_shape, self.compared_steps, i % self.num_texts)
            if row[:16] != written.digest:
                return False
        return True

    def _continue_texts(self) -> Int[np.ndarray, "texts tokens"]:
        """Return the texts, continued after their first token by the canonical decode."""
        text = self._continued_texts
        if text is None:
            text, decode, n = self.text.copy(), self.canonical.decode_shape, self.num_texts
            for step in range(1, self.compared_steps):
                token = self._run_step(decode, self._make_batch(decode, text, step - 1, 1)).sampled.token
                text[:n, step] = np.resize(token[: self._num_rows(decode), 0], n)
            self._continued_texts = text
        return text

    def time_step(self, shape: Shape, tokens: int) -> float:
        """Return the best seconds of a step that is full of rows of `compared_tokens` tokens, whose draft
        tokens are right."""
        text = self._continue_texts()
        batch = self._make_batch(shape, text, 0, min(tokens, self.compared_steps), tokens)
        times = []
        for _ in range(TIMED_RUNS):
            jax.block_until_ready(self._cache)  # the engine's last step may still run
            times += time_calls(lambda: self._run_step(shape, batch), 1)
        return min(times)

    @property
    def num_texts(self) -> int:
        """Number of texts of the rows of decode."""
        return min(self.canonical.decode_shape.rows, MAX_TEXTS)

    def _num_rows(self, shape: Shape, tokens: int = 0) -> int:
        """Return the number of rows of `compared_tokens` tokens, by default T, that a shape can run here."""
        return min(shape.max_rows(tokens or shape.tokens), self.pool, self.capacity)

    def _make_batch(
        self, shape: Shape, text: Int[np.ndarray, "texts tokens"], start: int, count: int, tokens: int = 0
    ) -> Batch:
        """Return a batch that is full of rows of `compared_tokens` tokens, by default T, each in its own
        pages. Row i has the tokens [start, start + count) of its text."""
        batch = empty_batch(self.programs.sizes, shape, self.capacity)
        for row in range(self._num_rows(shape, tokens)):
            row_tokens = text[row % self.num_texts, start : start + count]
            fill_row(batch, row, row_tokens, start, self._page_numbers(self._row_pages(row)), row)
        return batch

    def _row_pages(self, row: int) -> Int[np.ndarray, " M"]:
        """Return the indices of a row's pages among the borrowed pages."""
        return np.arange(row * self.pages_per_row, (row + 1) * self.pages_per_row, dtype=np.int32)

    # ------------------------------------------------------------ what was written

    @property
    def _cache(self) -> KVCache:
        assert self._arguments is not None
        return wait_result(self._arguments.cache)

    def _layer_pools(self, cache: KVCache) -> Iterator[tuple[Any, int]]:
        """Yield the pools of the model's layers, each with the number of its window."""
        windows = self.programs.config.windows
        for pools in (cache.k, cache.v, cache.states):
            for layer, pool in zip(self.layers, pools, strict=False):
                window = (
                    STATE_WINDOW
                    if pools is cache.states or layer.attention is None
                    else layer.attention.window
                )
                for leaf in jax.tree.leaves(pool):
                    yield leaf, windows.index(window)

    def _hash_pages(self, rows: Int[np.ndarray, "rows M"], tokens: int) -> list[bytes]:
        """Return a hash of each sequence's keys and values in all layers, of its first `compared_tokens`
        tokens.

        rows: indices of each sequence's pages among the borrowed pages.
        """
        hashers, pages = (
            [hashlib.blake2b(digest_size=16) for _ in rows],
            self._page_numbers(rows.reshape(-1)),
        )
        for pool, window in self._layer_pools(self._cache):
            copied = self._copy_pages(pool, pages[window])
            numbers = copied.reshape(copied.shape[0], len(rows), -1, *copied.shape[3:])
            end = None if self._is_state(window) else tokens
            for row, hasher in enumerate(hashers):
                hasher.update(numbers[:, row, :end].tobytes())
        return [hasher.digest() for hasher in hashers]

    def _is_state(self, window: int) -> bool:
        return self.programs.config.windows[window] == STATE_WINDOW

    def _compile_readers(self, cache: KVCache) -> dict[Any, Any]:
        """Compile a program for each kind of pool that copies pages out of it, as many as a row or a prefill
        has."""
        self._pages_per_read = max(self.pages_per_row, min(self.needed_pages, MIN_READ_PAGES))
        pages = jax.ShapeDtypeStruct((self._pages_per_read,), jnp.int32)
        pools = {pool_kind(pool): pool for pool, _ in self._layer_pools(cache)}
        return {
            name: jax.jit(read_pages, out_shardings=replicated_sharding(pool.sharding))
            .lower(pool, pages)
            .compile()
            for name, pool in pools.items()
        }

    def _copy_pages(
        self, pool: Shaped[Array, "K P W ..."], pages: Int[np.ndarray, " M"]
    ) -> Shaped[np.ndarray, "K M W ..."]:
        """Copy pages of a pool to the host, as one array."""
        n, reader = self._pages_per_read, self._page_readers[pool_kind(pool)]
        parts = [np.resize(pages[i : i + n], n) for i in range(0, len(pages), n)]
        return np.concatenate([np.asarray(reader(pool, part)) for part in parts], axis=1)[:, : len(pages)]


def values_per_token(pool: Any, is_state: bool) -> int:
    """Return how many numbers of a pool depend on a single token; of a state one for each dimension of a
    head."""
    return pool.shape[0] * (pool.shape[-1] if is_state else prod(pool.shape[3:]))


def read_pages(pool: Any, pages: Any) -> Any:
    """Copy pages out of a pool."""
    return pool[:, pages]


def pool_kind(pool: Any) -> Any:
    """Return the shape, dtype and sharding of a pool; one program reads all pools of a kind."""
    return pool.shape, str(pool.dtype), pool.sharding
