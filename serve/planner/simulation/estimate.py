"""Estimates of the load that an engine bears, without a simulation: the steady state in which as many
requests arrive as end. They rank candidates; what is reported has been simulated."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from ...runtime.compiled.shapes import Shape, shape_of_one, smallest
from ..roofline.bubbles import cycle
from ..workloads.tally import SLO
from ..workloads.workload import Workload
from .candidates import Candidate
from .times import StepCall

SAMPLE = 64  # prompts whose prefill is counted
FULL = 0.9  # share of the time that prefills may take: beyond, queues grow long
ROUNDS = 24  # of halving a rate's interval


@dataclass(frozen=True)
class SteadyState:
    """The steady state of one replica.

    rate: requests a second.
    tpot: seconds between a request's tokens.
    rows: that an engine decodes at the same time.
    bound: the limit that keeps it from a higher rate.
    """

    rate: float
    tpot: float
    rows: float
    bound: str


class PrefillTimes(NamedTuple):
    """Seconds of a prompt's prefill, on average, and of one that is longer than most."""

    mean: float
    long: float


def estimate(own: Candidate, load: Workload, within: SLO, share: float = 0.99) -> SteadyState:
    """Return the highest rate at which no bound is exceeded; `share` of the requests must keep the limits."""
    decode = cache(partial(between_tokens, own, load.context))
    at = partial(steady, own, load, within, prefill_seconds(own, load, share), decode)
    low, high = 0.0, 1.0
    while at(high).bound == "" and high < 1e6:
        low, high = high, 2 * high
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).bound == "" else (low, middle)
    found = at(low)
    return SteadyState(low, found.tpot, found.rows, at(high).bound)


def steady(
    own: Candidate,
    load: Workload,
    within: SLO,
    prefill: PrefillTimes,
    decode: Callable[[int], float],
    rate: float,
) -> SteadyState:
    """The state at a rate, and the bound that it exceeds, "" if none: rows follow from the time of a step,
    and that from the rows and the prefills between steps."""
    reading = rate * prefill.mean  # share of its time that an engine reads prompts
    if reading > FULL:
        return SteadyState(rate, 0.0, 0.0, "prefill")
    own_rate, beside = rate / own.decoders, 0.0 if own.apart else reading
    rows, tpot, seats = 1.0, 0.0, own.options.seats
    for _ in range(ROUNDS):
        tpot = decode(max(1, round(rows))) / (1 - beside)
        rows = own_rate * load.output * tpot
        if rows > seats:
            return SteadyState(rate, tpot, rows, "seats")
    ttft = prefill.long + prefill.mean * reading / (1 - reading) + tpot
    bounds = (
        (
            rows * (load.prompt * (1 - found_share(own, load)) + load.output) > own.fitted.cached_tokens,
            "cache",
        ),
        (tpot > within.tpot, "time between tokens"),
        (ttft > within.ttft, "time to the first token"),
    )
    return SteadyState(rate, tpot, rows, next((name for exceeded, name in bounds if exceeded), ""))


def between_tokens(own: Candidate, context: float, rows: int) -> float:
    """Seconds between two tokens of each of some rows that only decode."""
    o, lay = own.options, own.fitted.layout
    groups = (o.micro_batches or lay.stages) * lay.data
    each = max(1, -(-rows // groups))
    phase = "verify" if o.guesses else "decode"
    shape = call_shape(own.shapes, phase, each, 1 + o.guesses if o.guesses else o.steps_of(each))
    calls = -(-each // shape.rows)
    call = StepCall(
        shape, min(each, shape.rows), each * (1 + o.guesses), round(min(each, shape.rows) * context)
    )
    seconds = [calls * s for s in own.times(call)]
    groups //= lay.data
    step = groups * cycle(seconds, groups) if lay.stages > 1 else sum(seconds)
    host = own.times.efficiency.step + own.times.efficiency.row * rows
    return max(step, host) / tokens_of(own, shape)


def tokens_of(own: Candidate, shape: Shape) -> float:
    """Tokens that a row's call of a shape gives: steps, or the guesses that are right and one."""
    o, a = own.options, own.acceptance
    return sum(a**i for i in range(o.guesses + 1)) if o.guesses else shape.tokens


def call_shape(shapes: Iterable[Shape], phase: str, rows: int, tokens: int) -> Shape:
    """Return the smallest shape of a phase that holds `rows` rows, or the widest."""
    own = [s for s in shapes if s.phase == phase and s.tokens >= tokens]
    fewest = [s for s in own if s.tokens == min(s.tokens for s in own)]
    return smallest(fewest, min(rows, max(s.rows for s in fewest)), fewest[0].tokens)


def prefill_seconds(own: Candidate, load: Workload, share: float) -> PrefillTimes:
    """Return the seconds of a prompt's prefill in chunks, in the slowest stage, without the tokens that
    prompts share."""
    prefills = tuple(s for s in own.shapes if s.phase == "prefill")
    lacking = 1 - found_share(own, load)
    prompts = sorted(max(1, round(e.prompt * lacking)) for e in load.entries)
    some = prompts[:: max(1, len(prompts) // SAMPLE)]
    total = sum(prompt_seconds(own, prefills, tokens) for tokens in some)
    last = prompts[min(int(share * len(prompts)), len(prompts) - 1)]
    return PrefillTimes(total / len(some) / own.fitted.layout.data, prompt_seconds(own, prefills, last))


def found_share(own: Candidate, load: Workload) -> float:
    """Share of the prompts' tokens that are in the cache already."""
    return load.shared if own.options.enable_prefix_caching else 0.0


def prompt_seconds(own: Candidate, prefills: tuple[Shape, ...], tokens: int) -> float:
    most, done, total = min(max(s.tokens for s in prefills), own.options.prefill_tokens), 0, 0.0
    while done < tokens:
        count = min(most, tokens - done)
        shape = shape_of_one(prefills, count)
        total += max(own.times(StepCall(shape, 1, count, done)))
        done += count
    return total
