"""Estimates of the load that an engine sustains, without a simulation. They assume the steady state in which
as many requests arrive as end. Estimates rank candidates; reported figures are simulated."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from ...runtime.compiled.shapes import Shape, single_prompt_shape, smallest_shape
from ..roofline.bubbles import pipeline_step_seconds
from ..workloads.slo_stats import SLO
from ..workloads.workload import Workload
from .candidates import Candidate
from .step_times import StepCall

SAMPLED_PROMPTS = 64  # prompts whose prefill is computed
MAX_PREFILL_SHARE = 0.9  # share of the time that prefills may take; above it queues grow long
BISECTION_ROUNDS = 24  # bisections of a rate's interval


@dataclass(frozen=True)
class SteadyState:
    """The steady state of one replica.

    rate: requests a second.
    tpot: seconds between a request's tokens.
    rows: number of rows that an engine decodes at once.
    bound: the limit that keeps it from a higher rate, "" if none.
    """

    rate: float
    tpot: float
    rows: float
    bound: str


class PrefillTimes(NamedTuple):
    """Seconds of a prompt's prefill.

    mean: over all prompts.
    long_prompt: of a prompt that is longer than most.
    """

    mean: float
    long_prompt: float


def estimate_steady_state(
    candidate: Candidate, workload: Workload, slo: SLO, share: float = 0.99
) -> SteadyState:
    """Return the steady state at the highest rate that exceeds no bound. `share` of the requests must keep
    the limits."""
    decode = cache(partial(estimate_token_interval, candidate, workload.mean_context))
    state_at = partial(
        steady_state_at, candidate, workload, slo, estimate_prefill_times(candidate, workload, share), decode
    )
    low, high = 0.0, 1.0
    while state_at(high).bound == "" and high < 1e6:
        low, high = high, 2 * high
    for _ in range(BISECTION_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if state_at(middle).bound == "" else (low, middle)
    state = state_at(low)
    return SteadyState(low, state.tpot, state.rows, state_at(high).bound)


def steady_state_at(
    candidate: Candidate,
    workload: Workload,
    slo: SLO,
    prefill: PrefillTimes,
    decode: Callable[[int], float],
    rate: float,
) -> SteadyState:
    """Return the steady state at a rate, with the bound that it exceeds, "" if none. Rows follow from the
    seconds of a step. The seconds follow from the rows and the prefills between steps. Both are iterated."""
    prefill_share = rate * prefill.mean  # share of an engine's time spent in prefills
    if prefill_share > MAX_PREFILL_SHARE:
        return SteadyState(rate, 0.0, 0.0, "prefill")
    decoder_rate, lost_share = (
        rate / candidate.num_decoders,
        0.0 if candidate.decoders_per_prefill else prefill_share,
    )
    rows, tpot, num_slots = 1.0, 0.0, candidate.options.num_slots
    for _ in range(BISECTION_ROUNDS):
        tpot = decode(max(1, round(rows))) / (1 - lost_share)
        rows = decoder_rate * workload.output * tpot
        if rows > num_slots:
            return SteadyState(rate, tpot, rows, "seats")
    ttft = prefill.long_prompt + prefill.mean * prefill_share / (1 - prefill_share) + tpot
    bounds = (
        (
            rows * (workload.prompt * (1 - cached_share(candidate, workload)) + workload.output)
            > candidate.fitted.cache_capacity_tokens,
            "cache",
        ),
        (tpot > slo.tpot, "time between tokens"),
        (ttft > slo.ttft, "time to the first token"),
    )
    return SteadyState(rate, tpot, rows, next((name for exceeded, name in bounds if exceeded), ""))


def estimate_token_interval(candidate: Candidate, context: float, rows: int) -> float:
    """Return the seconds between two tokens of each of `rows` rows that only decode."""
    options, layout = candidate.options, candidate.fitted.layout
    groups = (options.micro_batches or layout.stages) * layout.data
    group_rows = max(1, -(-rows // groups))
    phase = "verify" if options.max_draft_tokens else "decode"
    shape = choose_call_shape(
        candidate.shapes,
        phase,
        group_rows,
        1 + options.max_draft_tokens if options.max_draft_tokens else options.decode_steps_for(group_rows),
    )
    calls = -(-group_rows // shape.rows)
    call = StepCall(
        shape,
        min(group_rows, shape.rows),
        group_rows * (1 + options.max_draft_tokens),
        round(min(group_rows, shape.rows) * context),
    )
    seconds = [calls * s for s in candidate.roofline(call)]
    groups //= layout.data
    step = groups * pipeline_step_seconds(seconds, groups) if layout.stages > 1 else sum(seconds)
    host = candidate.roofline.efficiency.step + candidate.roofline.efficiency.row * rows
    return max(step, host) / tokens_per_call(candidate, shape)


def tokens_per_call(candidate: Candidate, shape: Shape) -> float:
    """Return the tokens that a call of a shape gives a row: its steps, or the accepted guesses and one."""
    o, a = candidate.options, candidate.acceptance
    return sum(a**i for i in range(o.max_draft_tokens + 1)) if o.max_draft_tokens else shape.tokens


def choose_call_shape(shapes: Iterable[Shape], phase: str, rows: int, tokens: int) -> Shape:
    """Return the smallest shape of a phase that holds `rows` rows, or the widest."""
    fitting = [s for s in shapes if s.phase == phase and s.tokens >= tokens]
    fewest = [s for s in fitting if s.tokens == min(s.tokens for s in fitting)]
    return smallest_shape(fewest, min(rows, max(s.rows for s in fewest)), fewest[0].tokens)


def estimate_prefill_times(candidate: Candidate, workload: Workload, share: float) -> PrefillTimes:
    """Return the seconds of a prompt's prefill in chunks, in the slowest stage. `share` of the prompts are at
    most as long as the long one. Tokens in the prefix cache are not computed."""
    prefills = tuple(s for s in candidate.shapes if s.phase == "prefill")
    uncached_share = 1 - cached_share(candidate, workload)
    prompts = sorted(max(1, round(e.prompt_tokens * uncached_share)) for e in workload.entries)
    sample = prompts[:: max(1, len(prompts) // SAMPLED_PROMPTS)]
    total = sum(prompt_seconds(candidate, prefills, tokens) for tokens in sample)
    last = prompts[min(int(share * len(prompts)), len(prompts) - 1)]
    return PrefillTimes(
        total / len(sample) / candidate.fitted.layout.data, prompt_seconds(candidate, prefills, last)
    )


def cached_share(candidate: Candidate, workload: Workload) -> float:
    """Return the share of the prompts' tokens that are in the prefix cache."""
    return workload.shared if candidate.options.enable_prefix_caching else 0.0


def prompt_seconds(candidate: Candidate, prefills: tuple[Shape, ...], tokens: int) -> float:
    """Return the seconds to prefill `tokens` tokens in chunks."""
    max_tokens, done, total = min(max(s.tokens for s in prefills), candidate.options.prefill_tokens), 0, 0.0
    while done < tokens:
        count = min(max_tokens, tokens - done)
        shape = single_prompt_shape(prefills, count)
        total += max(candidate.roofline(StepCall(shape, 1, count, done)))
        done += count
    return total
