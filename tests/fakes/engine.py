"""An engine over the fake device, with requests, drafters and texts to serve in it."""

from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from fakes.device import VOCAB, FakeExecutor, Params, next_token

from duetto import SamplingParams
from duetto.kvcache.tables import max_window_pages
from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request
from duetto.serve.engine.core.scheduler_output import SchedulerConfig
from duetto.serve.engine.core.speculation import Speculation
from duetto.serve.engine.speculation.acceptance import Offer
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.equal_bits.classes import ShapeClasses


class Halfright:
    """A drafter that knows the fake model, and is wrong after a number of tokens that their hash decides."""

    def __init__(self, sight: int | None):
        self.sight, self.texts = sight, {}

    def begin(self, request: Request, prompt: Sequence[int], salt: bytes = b"") -> None:
        assert request not in self.texts
        self.texts[request] = list(prompt)

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        self.texts[request] += tokens

    def propose(self, request: Request, k: int) -> list[int]:
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


class Fickle:
    """A controller that takes each number of guesses in turn, and does not always ask."""

    def __init__(self, k: int):
        self.k, self.turn, self.asked = k, 0, 0

    def choose_draft_counts(self, offers: Sequence[Offer]) -> list[int]:
        self.turn += 1
        return [
            min(offer.num_draft_tokens, (self.turn + row) % 3 * self.k) for row, offer in enumerate(offers)
        ]

    def should_speculate(self, rows: int) -> bool:
        self.asked += 1
        return self.asked % 7 < 5

    def record_acceptance(self, streak_class: int, offered: int, accepted: int) -> None: ...
    def record_speculative(
        self, draft_counts: Sequence[int], tokens: int, seconds: float, has_prompts: bool = False
    ) -> None: ...
    def record_plain(self, rows: int, seconds: float) -> None: ...
    def learn_shadow_offers(self, rows: int, offers: Sequence[Offer]) -> None: ...


def speculate(guesses: int, adaptive: bool, sight: int | None) -> Speculation:
    speculation = Speculation(Halfright(sight), guesses)
    if adaptive:
        speculation.controller = cast(Any, Fickle(guesses))
    return speculation


class StopsAfter:
    """A text in which a stop string appears after some tokens: the host alone knows."""

    def __init__(self, tokens: int):
        self.left, self.stop_hit = tokens, None

    def push(self, ids: list[int], num_below_min: int = 0) -> None:
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
    shards: int = 1,
) -> tuple[Engine, FakeExecutor]:
    """An engine over a fake device; `rows` prompts share a prefill, a call decodes `width` rows. Seats and
    pages are those of each of `shards`."""
    longest, work = min(max_model_len, pages * page_size), max(budget, decode_steps, guesses) + 1

    def count(window: int | None) -> int:
        if window is None:
            return pages
        one = min(max_window_pages(window, work, page_size), -(-longest // page_size))
        return max(one, min(pages, one * seats))

    sizes = Sizes(longest, seats, tuple(map(count, windows)), page_size, shards=shards)
    executor = FakeExecutor(sizes, windows, boundary)
    prefill = {Shape("prefill", 1, 2), Shape("prefill", 1, chunk), Shape("prefill", rows, 2)}
    decode = {Shape("decode", w, t) for w in (1, width) for t in (1, decode_steps)}
    verify = {Shape("verify", 1, guesses + 1), Shape("verify", width, 2)} if guesses else set()
    classes = ShapeClasses(tuple(sorted(prefill)), tuple(sorted(decode)), same_bits, tuple(sorted(verify)))
    limits = SchedulerConfig(sizes.num_slots, budget, 2, decode_steps, guesses, shards=shards)
    speculation = speculate(guesses, adaptive, windows[0]) if guesses else None
    state = executor.fresh_arguments(Params(jnp.zeros((2, 2))))
    return Engine(executor, classes, state, limits, caching, speculation), executor


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
        detokenizer=cast(Any, text),
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
