"""Which compiled shapes give the same bits, and how long they take: found by running all of them before the
first request.

A matrix product's rows depend on its number of rows only through the kernel that the compiler picks for it.
So shapes fall into classes; within one, a request's bits do not depend on the shapes that its tokens happened
to run in.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from ...kvcache.pages import Batch, KVCache
from ...model.pair import target_of
from ...sampling.params import SamplingParams, knobs_row
from ..host import clock, progress
from . import kept
from .compile import Arguments, Programs, fill
from .shapes import Canonical, Shape, doublings, smallest
from .step import Output, Seat

REPEATS = 5  # runs of a shape that is timed
TEXTS = 64  # that a prefill is probed with, at most
NUMBERS = 1 << 20  # that shapes are compared by, if rounded to 16 bits: few show that sums differ
WHOLE_NUMBERS = 1 << 14  # and in 32 bits, where most show it


@dataclass(frozen=True)
class Classes:
    """The shapes that may serve together, and whether prefill and decode write the same bits."""

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    same_bits: bool
    verify: tuple[Shape, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.prefill, *self.decode, *self.verify)


class Written(NamedTuple):
    """A digest of a sequence's keys and values, and samples' log-probabilities by the tokens before them."""

    digest: bytes
    scores: dict[int, bytes]


class Probe:
    """Runs shapes on fixed token sequences in an idle engine and digests what they write and sample."""

    def __init__(self, programs: Programs, arguments: Arguments, tokens: int, canonical: Canonical):
        self.programs, self.arguments, self.canonical = programs, arguments, canonical
        self.page_size, self.pool = programs.sizes.page_size, min(programs.sizes.pages)
        self.tokens = min(tokens, self.page_size * min(self.pool, programs.sizes.table_width))
        self.layers = len(target_of(arguments.params).layers)  # a guess may have any bits
        self.capacity, V = arguments.slots.sampling.bias.shape
        self.pages = max(min(self.pool // self.capacity, programs.sizes.table_width), 1)  # of a row of decode
        self.text = np.random.default_rng(0).integers(0, V, (TEXTS, self.tokens), dtype=np.int32)
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

    def _own(self, pages: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, " M"]]:
        return [pages] * len(self.programs.sizes.pages)

    def prefill(self, shape: Shape, tokens: int, text: int = 0) -> Written:
        """What a prefill writes of a sequence's first tokens, and scores where the canonical one has some."""
        pages = np.arange(-(-tokens // self.page_size), dtype=np.int32)
        scores = {}
        for first in range(0, tokens, shape.area):
            batch = self.programs.empty_batch(shape, self.capacity)
            starts = range(first, min(first + shape.area, tokens), shape.tokens)
            ends = [min(start + shape.tokens, tokens) for start in starts]
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                fill(batch, row, self.text[text, start:end], start, self._own(pages), 0)
            logprob = self._run(shape, batch).sampled.logprob
            found = {end: logprob[row, 0].tobytes() for row, end in enumerate(ends)}
            scores |= {
                end: x
                for end, x in found.items()
                if end % self.canonical.prefill.tokens == 0 or end == tokens
            }
        return Written(self._digests(pages[None], tokens)[0], scores)

    def agrees(self, shape: Shape) -> bool:
        """Whether a full prefill writes what the canonical one does, for the texts that it takes to tell."""
        if shape == self.canonical.prefill:
            return True
        tokens = min(shape.area, self.tokens)
        texts = min(TEXTS, -(-self._tokens // tokens))
        return all(self._equal(shape, tokens, i) for i in range(texts))

    @property
    def _tokens(self) -> int:
        """Tokens that leave enough numbers in the cache to tell."""
        pools = jax.tree.leaves(self._cache)
        numbers = NUMBERS if pools[0].dtype.itemsize < 4 else WHOLE_NUMBERS
        return -(-numbers // sum(K * H for K, _, _, H in (pool.shape for pool in pools)))

    def steps(self, least: int) -> int:
        """Steps of the canonical decode that it takes to tell, `least` or more, as far as the rows' pages
        hold them."""
        enough = -(-self._tokens // self.canonical.decode.rows)
        return min(max(enough, least), self.pages * self.page_size, self.tokens)

    def _equal(self, shape: Shape, tokens: int, text: int) -> bool:
        found, wanted = self.prefill(shape, tokens, text), self.prefill(self.canonical.prefill, tokens, text)
        return found.digest == wanted.digest and found.scores.items() <= wanted.scores.items()

    def decode(self, shape: Shape, steps: int) -> list[bytes]:
        """Digest of each row after `steps` tokens, rows taking the sequences in turn; all of them, in several
        turns of a narrow shape."""
        rows, own = self._rows(self.canonical.decode), self._rows(shape)
        found = [each for first in range(0, rows, own) for each in self._decode(shape, steps, first)]
        return found[: max(rows, own)]

    def _decode(self, shape: Shape, steps: int, first: int) -> list[bytes]:
        """Digests of a turn, whose rows begin with the sequence `first`."""
        scores = [b""] * self._rows(shape)
        for start in range(0, steps, shape.tokens):
            count = min(shape.tokens, steps - start)
            logprob = self._run(shape, self._batch(shape, start, count, first)).sampled.logprob
            scores = [score + logprob[row, :count].tobytes() for row, score in enumerate(scores)]
        pages = np.stack([self._pages(row) for row in range(len(scores))])
        return [own + score for own, score in zip(self._digests(pages, steps), scores, strict=True)]

    @property
    def _cache(self) -> KVCache:
        """The pools of the layers whose bits matter."""
        cache = self.arguments.cache
        return KVCache(cache.k[: self.layers], cache.v[: self.layers])

    def _digests(self, pages: Int[np.ndarray, "rows M"], tokens: int) -> list[bytes]:
        return digests(self._cache, pages, tokens)

    @property
    def sequences(self) -> int:
        """Texts that rows of decode take in turn."""
        return min(self.canonical.decode.rows, TEXTS)

    def _rows(self, shape: Shape) -> int:
        return min(shape.rows, self.pool, self.capacity)

    def _batch(self, shape: Shape, start: int, count: int, first: int = 0) -> Batch:
        """Rows in pages of their own, with tokens [start, start + count) of the sequences from `first` on."""
        batch = self.programs.empty_batch(shape, self.capacity)
        for row in range(self._rows(shape)):
            own = self.text[(first + row) % self.sequences, start : start + count]
            fill(batch, row, own, start, self._own(self._pages(row)), row)
        return batch

    def _pages(self, row: int) -> Int[np.ndarray, " M"]:
        return np.arange(row * self.pages, (row + 1) * self.pages, dtype=np.int32)

    def write(self, steps: int) -> None:
        """Let each sequence's first tokens be what decode makes of its first one: guesses that are right."""
        decode, n = self.canonical.decode, self.sequences
        for step in range(1, steps):
            token = self._run(decode, self._batch(decode, step - 1, 1)).sampled.token
            self.text[:n, step] = np.resize(token[: self._rows(decode), 0], n)

    def seconds(self, shape: Shape) -> float:
        """The best time of a step of full rows whose guesses are right."""
        batch = self._batch(shape, 0, min(shape.tokens, self.page_size))
        return min(clock.seconds(lambda: self._run(shape, batch), REPEATS))


def digests(cache: KVCache, pages: Int[np.ndarray, "rows M"], tokens: int) -> list[bytes]:
    """A hash of each sequence's keys and values in all layers: its first tokens, in pages of its own."""
    found = [hashlib.blake2b(digest_size=16) for _ in pages]
    for pool in jax.tree.leaves(cache):
        K, _, _, H = pool.shape
        rows = np.asarray(pool[:, pages.reshape(-1)]).reshape(K, len(pages), -1, H)[:, :, :tokens]
        for row, own in enumerate(found):
            own.update(rows[:, row].tobytes())
    return [own.digest() for own in found]


def choose_classes(
    programs: Programs, arguments: Arguments, canonical: Canonical, reproducible: bool
) -> tuple[Classes, Arguments]:
    """The shapes that may serve together: under the reproducibility contract those with the bits of the
    canonical ones, else all."""
    if reproducible:
        return known_classes(programs, arguments, canonical)
    phases = ("prefill", "decode", "verify")
    prefill, decode, verify = (
        tuple(s for s in sorted(programs.steps) if s.phase == phase) for phase in phases
    )
    return Classes(prefill, decode, True, verify), arguments


def known_classes(
    programs: Programs, arguments: Arguments, canonical: Canonical
) -> tuple[Classes, Arguments]:
    """What an earlier start of the same programs with the same parameters has found, or `find_classes`."""
    if programs.key is None or kept.folder() is None:
        return find_classes(programs, arguments, canonical)
    own = kept.combined([programs.key], fingerprint(arguments.params), canonical)
    if programs.loaded and (known := kept.read(own, Classes)):  # what is compiled anew may have other bits
        return known, arguments
    classes, arguments = find_classes(programs, arguments, canonical)
    kept.write(own, classes)
    return classes, arguments


def fingerprint(params: Any) -> str:
    """A hash of each parameter's first numbers."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(0,) * max(leaf.ndim - 1, 0)]).tobytes())
    return found.hexdigest()


def find_classes(programs: Programs, arguments: Arguments, canonical: Canonical) -> tuple[Classes, Arguments]:
    """Compare every shape with the canonical one of its phase; cache and slots are used as scratch."""
    shapes = sorted(programs.steps)
    prefills = [s for s in shapes if s.phase == "prefill"]
    widths, guessed = ([s for s in shapes if s.phase == phase] for phase in ("decode", "verify"))
    steps = max(s.tokens for s in (*widths, *guessed))
    probe = Probe(programs, arguments, max(s.area for s in prefills), canonical)
    few = probe.steps(max(steps, 4))
    with progress.stage("probing which programs give the same bits", len(shapes)) as done:
        prefill = tuple(s for s in prefills if done(probe.agrees(s)))
        rows = probe.decode(canonical.decode, few)
        decode = tuple(
            s for s in widths if done(s == canonical.decode or same_rows(probe.decode(s, few), rows))
        )
        same_bits = all(
            row[:16] == probe.prefill(canonical.prefill, few, i).digest for i, row in enumerate(rows)
        )
        verify: tuple[Shape, ...] = ()
        if guessed:
            probe.write(few)
            rows = probe.decode(canonical.decode, few)
            verify = tuple(s for s in guessed if done(same_rows(probe.decode(s, few), rows)))
    return Classes(prefill, decode, same_bits, verify), probe.arguments


def step_seconds(
    programs: Programs, arguments: Arguments, canonical: Canonical, classes: Classes, k: int
) -> tuple[dict[tuple[int, int], float], Arguments]:
    """Seconds of a step by its rows (1, 2, 4, ... all seats) and the most guesses of a row, of shapes that
    are full.

    Rows beyond what a shape holds take several calls. The cache and the slots are used as scratch.
    """
    probe = Probe(programs, arguments, programs.sizes.page_size, canonical)
    probe.write(min(max((s.tokens for s in classes.verify), default=1), probe.tokens))
    timed = (*classes.decode, *classes.verify)
    with progress.stage("measuring steps", len(timed)) as done:
        seconds = {shape: done(probe.seconds(shape)) for shape in timed}
    ks = sorted({0} | {min(s.tokens - 1, k) for s in classes.verify})

    def step(rows: int, guesses: int) -> float:
        shapes = classes.verify if guesses else classes.decode
        most = max(s.rows for s in shapes if s.tokens > guesses)
        full, rest = divmod(rows, most)
        calls = [most] * full + [rest] * (rest > 0)
        return sum(seconds[smallest(shapes, n, guesses + 1)] for n in calls)

    sizes = doublings(1, probe.capacity)
    return {(rows, guesses): step(rows, guesses) for rows in sizes for guesses in ks}, probe.arguments


def same_rows(found: list[bytes], reference: list[bytes]) -> bool:
    return all(row == reference[i % len(reference)] for i, row in enumerate(found))
