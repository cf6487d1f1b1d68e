"""A device that computes hashes: a key is a hash of the weights, its token and all keys before it, and a
token one of the keys that it follows. So a wrong page causes wrong tokens, and each answer has an oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from duetto.kvcache.pages import Batch
from duetto.sampling.params import NO_TOKEN
from duetto.sampling.sample import Sampled
from duetto.serve.runtime.compiled.lowering import StepArguments
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.compiled.transfers import padded_count
from duetto.serve.runtime.executor import NullExecutor
from duetto.serve.runtime.steps.output import NO_PROMPT_INPUTS, Output, PromptInputs
from duetto.serve.runtime.steps.step import SlotContents

VOCAB = 61
BROKEN = jax.errors.JaxRuntimeError
MASK = (1 << 64) - 1
ODD = np.random.default_rng(0).integers(0, 1 << 63, 4096, np.uint64) * np.uint64(2) + np.uint64(1)
ODDS: list[int] = ODD.tolist()
PREFILL, DECODE = 1, 2


def mixed(x: int) -> int:
    """Apply the finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key_at(weights: int, position: int, token: int, phase: int, before: int) -> int:
    """Return the key of a token behind keys whose sum is `before`."""
    return mixed(before ^ mixed(weights * 1_000_003 + position * 8191 + token * 5 + phase))


def token_after(keys: int, seed: int, position: int, mask: int | None = None) -> int:
    """Return the token at a position that follows keys with a sum; `mask` has a bit for each that may."""
    drawn = mixed(keys ^ mixed(seed * 31 + position))
    if mask is None:
        return drawn % VOCAB
    allowed = [token for token in range(VOCAB) if mask >> token & 1]
    return allowed[drawn % len(allowed)]


class Weights(NamedTuple):
    """Parameters whose only content is their number."""

    embed: jax.Array


MADE: dict[int, Weights] = {}


def weights_of(number: int) -> Weights:
    if number not in MADE:
        MADE[number] = Weights(jnp.full((2, 2), number, jnp.float32))
    return MADE[number]


def number_of(params: Any) -> int:
    found = next((n for n, own in MADE.items() if own.embed is params.embed), None)
    return int(params.embed[0, 0]) if found is None else found


def first_seen(window: int | None, position: int) -> int:
    return 0 if window is None else max(0, position + 1 - window)


@dataclass
class Slot:
    seat: SlotContents
    last: int = -1
    live: bool = True

    def __post_init__(self):
        self.seed, self.known, self.end = int(self.seat.knobs.seed), int(self.seat.known), int(self.seat.end)
        self.is_constrained = bool(self.seat.knobs.is_constrained)
        self.stops = set(np.asarray(self.seat.knobs.stop_ids).tolist())


@dataclass
class Keys:
    """The pools: a key for each place of each page, the same in all windows' layers."""

    pools: list[np.ndarray]
    broken: bool = False


@dataclass(frozen=True)
class Result:
    """Output on its way."""

    output: Output
    keys: Keys

    def wait_result(self) -> Output:
        if self.keys.broken:
            raise BROKEN("INTERNAL: the simulated device had failed")
        return self.output


class ChaosExecutor(NullExecutor):
    """Executor over `Keys`. `fail` is the way in which the next step fails: "dispatch" or "read"."""

    def __init__(self, sizes: Sizes, windows: Sequence[int | None], same_bits: bool):
        target = SimpleNamespace(vocab_size=VOCAB)
        config = SimpleNamespace(
            target=target, windows=tuple(windows), longrope_boundary=None, prefill_alignment=1, layers=()
        )
        super().__init__(config, sizes)
        self.same_bits, self.ran = same_bits, 0
        self.fail: str | None = None
        self.slots: dict[int, Slot] = {}
        self.masks: dict[
            int, tuple[int, list[int]]
        ] = {}  # of slots: the first position, and those from it on

    def fresh_arguments(self, params: Any, failure: BaseException | None = None) -> StepArguments:
        self.slots = {}
        rubbish = np.uint64(0xBAD0BAD0BAD0BAD0)
        pools = [np.full((pages, self.sizes.page_size), rubbish) for pages in self.sizes.pages]
        return StepArguments(params, Keys(pools), None)

    def assign_slot(self, slots: Any, slot: np.int32, contents: SlotContents) -> Any:
        self.slots[int(slot)] = Slot(contents)

    def load_history(self, slots: Any, *history: Any) -> Any:
        return slots

    def load_masks(self, slots: Any, seats: Any, first: Any, masks: Any) -> Any:
        for seat, position, rows in zip(seats.tolist(), first.tolist(), masks, strict=True):
            self.masks[seat] = position, [int.from_bytes(w.astype("<u4").tobytes(), "little") for w in rows]

    def run(
        self, shape: Shape, arguments: Any, batch: Batch, prompt_inputs: PromptInputs = NO_PROMPT_INPUTS
    ) -> tuple[Keys, None, Result]:
        keys, (fail, self.fail) = arguments.cache, (self.fail, None)
        self.ran += 1
        if fail == "dispatch":
            raise BROKEN("INTERNAL: the simulated device has failed")
        if fail == "read":
            keys.broken = True
        weights = number_of(arguments.params)
        rows, columns = len(batch.count), 1 if shape.phase == "prefill" else shape.tokens
        tokens = np.full((rows, columns), NO_TOKEN, np.int32)
        for row in range(rows):
            if batch.count[row]:
                self._row(shape, weights, keys, batch, row, tokens)
        zeros = np.zeros(tokens.shape), np.zeros(tokens.shape, np.int32)
        alternatives = np.zeros((*tokens.shape, 1), np.int32), np.zeros((*tokens.shape, 1))
        return keys, None, Result(Output(Sampled(tokens, *zeros, *alternatives), None), keys)

    def _row(
        self, shape: Shape, weights: int, keys: Keys, batch: Batch, row: int, tokens: np.ndarray
    ) -> None:
        """Write and read a row's keys token by token, and sample where its known tokens end."""
        slot, start, count = self.slots[int(batch.slot[row])], int(batch.start[row]), int(batch.count[row])
        prefill = shape.phase == "prefill"
        phase = PREFILL if prefill or self.same_bits else DECODE
        for i in range(count):
            if not prefill and not slot.live:
                break
            position, given = start + i, int(batch.tokens[row, i])
            token = slot.last if given < 0 else given
            own = key_at(weights, position, token, phase, self._sum(keys, batch, row, position, position))
            for g, pool in enumerate(keys.pools):
                page = int(batch.page_tables[g][row, position // self.sizes.page_size])
                pool[page, position % self.sizes.page_size] = own
            if position + 1 >= slot.known:
                drawn = self._drawn(
                    int(batch.slot[row]),
                    slot,
                    self._sum(keys, batch, row, position + 1, position),
                    position + 1,
                )
                tokens[row, 0 if prefill else i] = drawn

    def _sum(self, keys: Keys, batch: Batch, row: int, end: int, position: int) -> int:
        """Sum the keys before `end` that a token at a position sees, each times an odd number."""
        total, W = 0, self.sizes.page_size
        for g, window in enumerate(self.config.windows):
            first = first_seen(window, position)
            pages = batch.page_tables[g][row, first // W : -(-end // W)]
            flat = keys.pools[g][pages].reshape(-1)[first % W :][: end - first]
            total += int(flat @ ODD[first:end])
        return total & MASK

    def _drawn(self, seat: int, slot: Slot, keys: int, position: int) -> int:
        mask = None
        if slot.is_constrained:  # a mask that was not loaded is an older one
            first, masks = self.masks.get(seat, (position, [MASK]))
            mask = masks[min(max(position - first, 0), len(masks) - 1)] or MASK
        token = token_after(keys, slot.seed, position, mask)
        slot.last = token
        slot.live = token not in slot.stops and position + 1 < slot.end
        return token


class ChaosTransfers:
    """Copies of pages: contents are their keys."""

    def __init__(self, executor: ChaosExecutor):
        self._executor, self.windows = executor, range(len(executor.config.windows))
        self.page_bytes = [8 * executor.sizes.page_size for _ in self.windows]

    def abstract_leaves(self, window: int, n: int) -> tuple[SimpleNamespace]:
        shape = 1, n, self._executor.sizes.page_size
        return (SimpleNamespace(shape=shape, dtype=np.dtype("uint64")),)

    def gather(self, cache: Keys, window: int, pages: Sequence[int]) -> tuple["Copied"]:
        found = np.zeros((1, padded_count(len(pages)), self._executor.sizes.page_size), np.uint64)
        found[0, : len(pages)] = cache.pools[window][list(pages)]
        return (Copied(found, cache),)

    def copy_to_device(self, window: int, leaves: Any) -> Any:
        return leaves

    def scatter(self, cache: Keys, window: int, leaves: Any, pages: Sequence[int | None]) -> Keys:
        for i, page in enumerate(pages):
            if page is not None:
                cache.pools[window][page] = leaves[0][0, i]
        return cache


@dataclass
class Copied:
    """A leaf on its way to the host; that of a broken device does not arrive."""

    value: np.ndarray
    keys: Keys

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.keys.broken:
            raise BROKEN("INTERNAL: the simulated device had failed")
        return self.value


# ---------------------------------------------------------------- the oracle


class Oracle:
    """What a request's tokens are, from its own tokens alone: no page, batch or other process matters."""

    def __init__(self, windows: Sequence[int | None], same_bits: bool):
        self._windows, self._same_bits = windows, same_bits

    def keys(
        self, weights: int, tokens: Sequence[int], prompt: int, keys: list[int] | None = None
    ) -> list[int]:
        """Return the keys of tokens, continuing those that are given."""
        found = [] if keys is None else keys
        for position in range(len(found), len(tokens)):
            phase = PREFILL if position < prompt or self._same_bits else DECODE
            found.append(key_at(weights, position, tokens[position], phase, self.sum(found, position)))
        return found

    def sum(self, keys: list[int], position: int) -> int:
        """Sum the keys that a token at a position sees."""
        end, total = len(keys), 0
        for window in self._windows:
            first = first_seen(window, position)
            total += sum(map(mul, keys[first:], ODDS[first:end]))
        return total & MASK
