"""Which compiled shapes give the same bits: found by running all of them on the same rows before the first request.

A matrix product's rows depend on its number of rows only through the kernel that the compiler picks for it. So shapes fall
into classes; within one, a request's bits do not depend on the shapes that its tokens happened to run in.
"""

import hashlib
from dataclasses import dataclass, replace

import jax
import numpy as np

from ..kvcache.pages import Batch, KVCache
from ..sampling.params import SamplingParams, knobs_row
from .programs import Arguments, Programs, Shape, fill
from .step import Output, Seat

CANONICAL_PREFILL = Shape("prefill", 1, 64)
CANONICAL_DECODE = Shape("decode", 8, 1)


@dataclass(frozen=True)
class Classes:
    """The shapes that may serve together, and whether prefill and decode write the same bits."""

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    joined: bool


class Probe:
    """Runs shapes on fixed token sequences in an otherwise idle engine and digests what they write and sample."""

    def __init__(self, programs: Programs, arguments: Arguments, tokens: int):
        self.programs, self.arguments = programs, arguments
        self.page_size, self.pool = arguments.cache.page_size, arguments.cache.pages
        self.tokens = min(tokens, self.page_size * min(self.pool, programs.table_width))
        self.capacity, V = arguments.slots.sampling.bias.shape
        self.text = np.random.default_rng(0).integers(0, V, (8, self.tokens), dtype=np.int32)
        for slot in range(self.capacity):
            self._seat(slot)

    def _seat(self, slot: int) -> None:
        params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True)
        knobs = knobs_row(params, seed=0, stop_ids=(), prompt_len=0)
        new = Seat(np.int32(0), np.int32(2**31 - 1), np.bool_(False), knobs)
        slots = self.programs.seat(self.arguments.slots, np.int32(slot), new)
        self.arguments = replace(self.arguments, slots=slots)

    def _run(self, shape: Shape, batch: Batch) -> Output:
        cache, slots, out = self.programs.run(shape, self.arguments, batch)
        self.arguments = replace(self.arguments, cache=cache, slots=slots)
        return jax.tree.map(np.asarray, out)

    def prefill(self, shape: Shape, tokens: int) -> bytes:
        """Digest of the keys and values of one sequence's first tokens, and of the last sample's log-probability."""
        pages = np.arange(-(-tokens // self.page_size), dtype=np.int32)
        out = None
        for start in range(0, tokens, shape.tokens):
            batch = self.programs.empty_batch(shape, self.capacity)
            count = min(shape.tokens, tokens - start)
            fill(batch, 0, self.text[0, start : start + count], start, pages, 0)
            out = self._run(shape, batch)
        assert out is not None
        return digest(self.arguments.cache, pages, tokens) + out.sampled.logprob[0, 0].tobytes()

    def decode(self, shape: Shape, steps: int) -> list[bytes]:
        """Digest of each row after `steps` tokens, rows taking the sequences in turn."""
        rows = min(shape.rows, self.pool, self.capacity)
        scores = [b""] * rows
        for start in range(0, steps, shape.tokens):
            batch = self.programs.empty_batch(shape, self.capacity)
            count = min(shape.tokens, steps - start)
            for row in range(rows):
                page = np.array([row], np.int32)
                fill(batch, row, self.text[row % 8, start : start + count], start, page, row)
            logprob = self._run(shape, batch).sampled.logprob
            scores = [scores[row] + logprob[row, :count].tobytes() for row in range(rows)]
        return [digest(self.arguments.cache, [row], steps) + scores[row] for row in range(rows)]


def digest(cache: KVCache, pages: np.ndarray | list[int], tokens: int) -> bytes:
    """A hash of the keys and values of a sequence's first tokens in all layers."""
    found = hashlib.blake2b(digest_size=16)
    for pool in (*cache.k, *cache.v):
        rows = np.asarray(pool[:, np.asarray(pages)])
        K, P, W, H = rows.shape
        found.update(np.ascontiguousarray(rows.reshape(K, P * W, H)[:, :tokens]).tobytes())
    return found.digest()


def choose_classes(programs: Programs, arguments: Arguments, reproducible: bool) -> tuple[Classes, Arguments]:
    """The shapes that may serve together: those of one class under the reproducibility contract, else all."""
    if reproducible:
        return find_classes(programs, arguments)
    phases = ("prefill", "decode")
    prefill, decode = (tuple(s for s in sorted(programs.steps) if s.phase == phase) for phase in phases)
    return Classes(prefill, decode, True), arguments


def find_classes(programs: Programs, arguments: Arguments) -> tuple[Classes, Arguments]:
    """Compare every shape with the canonical one of its phase; the cache and the slots are used as scratch."""
    shapes = sorted(programs.steps)
    chunks = [s for s in shapes if s.phase == "prefill"]
    widths = [s for s in shapes if s.phase == "decode"]
    steps = max(s.tokens for s in widths)
    probe = Probe(programs, arguments, max(s.tokens for s in chunks))
    reference = probe.prefill(CANONICAL_PREFILL, probe.tokens)
    prefill = tuple(s for s in chunks if probe.prefill(s, probe.tokens) == reference)
    few = min(max(steps, 4), probe.page_size)
    rows = probe.decode(CANONICAL_DECODE, few)
    decode = tuple(s for s in widths if same_rows(probe.decode(s, few), rows))
    joined = probe.decode(CANONICAL_DECODE, few)[0][:16] == probe.prefill(CANONICAL_PREFILL, few)[:16]
    return Classes(prefill, decode, joined), probe.arguments


def same_rows(found: list[bytes], reference: list[bytes]) -> bool:
    return all(row == reference[i % len(reference)] for i, row in enumerate(found))
