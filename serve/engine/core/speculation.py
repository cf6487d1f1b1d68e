"""Speculative decoding on the host: draft tokens of running requests, how many of them a step verifies, and
how many were accepted."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....kvcache.pages import ON_DEVICE
from ..speculation.acceptance import UNKNOWN, Offer, classify_streak
from ..speculation.controller import Controller
from ..speculation.drafter import DEVICE_DRAFTER, Drafter
from .request import Request
from .scheduler_output import ProposeDrafts, RowResult, ScheduledTokens

STEPS_BETWEEN_SHADOWS = 16  # plain steps between two drafts that are compared, not verified
SHADOW_REQUESTS = 2  # requests of such a draft
MAX_SHADOW_OFFERS = 8  # latest offers of such drafts, which stand for all requests


class StepArrival(NamedTuple):
    """Arrival of a step's results."""

    seconds: float  # time in seconds, by a clock that stops during prefill
    was_awaited: bool  # the next step was planned after them
    has_prompts: bool  # the step computed prompts


@dataclass
class DraftState:
    """Drafting state of one request."""

    num_seen: int  # tokens that the drafter has
    draft_tokens: Sequence[int] = ()  # the latest ones, which follow the first `num_seen` tokens
    streak: int | None = None  # right draft tokens in succession; None before the first is judged

    @property
    def streak_class(self) -> int:
        return UNKNOWN if self.streak is None else classify_streak(self.streak)


class Speculation:
    """Takes draft tokens from a drafter and the number to verify from a controller. The engine calls
    `proposer_if_speculative`, `record_step` and `forget`.

    k: most draft tokens of a row.
    controller: without one, every draft token is verified.

    The drafter gets a request's new tokens when it is asked for draft tokens, not as each of them comes.
    Nothing here changes a result: it only decides what a step verifies.
    """

    def __init__(self, drafter: Drafter, k: int, controller: Controller | None = None):
        self.drafter, self.k, self.controller = drafter, k, controller
        self.draft_states: dict[Request, DraftState] = {}
        self.last_arrival: StepArrival | None = None
        self.plain_steps, self.shadow_offers = 0, deque[Offer](maxlen=MAX_SHADOW_OFFERS)
        self.passes = self.emitted = self.drafted = 0
        self.judged, self.right = [0] * k, [0] * k

    # ------------------------------------------------------------ draft tokens of the next step

    def proposer_if_speculative(self, rows: int, is_idle: bool) -> ProposeDrafts | None:
        """Return the function that proposes draft tokens of the next step, of `rows` rows; None for a plain
        step.

        The function is called once the last step's tokens are known.

        is_idle: no step is in flight.
        """
        if is_idle:
            self.last_arrival = None
        is_speculative = rows > 0 and (self.controller is None or self.controller.should_speculate(rows))
        return self._propose_rows if is_speculative else None

    def _propose_rows(self, scheduled_rows: Sequence[ScheduledTokens]) -> list[Sequence[int]]:
        drafts = [self._propose_row(scheduled) for scheduled in scheduled_rows]
        if self.controller is None or not scheduled_rows:
            return drafts
        offers = [
            self._make_offer(scheduled.request, draft_tokens)
            for scheduled, draft_tokens in zip(scheduled_rows, drafts, strict=True)
        ]
        counts = self.controller.choose_draft_counts(offers)
        return [draft_tokens[:n] for draft_tokens, n in zip(drafts, counts, strict=True)]

    def _propose_row(self, scheduled: ScheduledTokens) -> Sequence[int]:
        """Return a row's draft tokens; none for a row that replays tokens from before a preemption."""
        request = scheduled.request
        if scheduled.start + 1 < len(request.tokens):
            return ()
        return self._propose(request, min(self.k, request.slot_end - 2 - scheduled.start))

    def _propose(self, request: Request, k: int) -> Sequence[int]:
        """Pass a request's new tokens to the drafter, and return k draft tokens. The new tokens judge the
        last ones."""
        draft_state = self.draft_states.get(request)
        if draft_state is None:
            draft_state = self.draft_states[request] = DraftState(len(request.tokens))
            self.drafter.begin(request, request.prompt, request.cache_salt)
            self.drafter.extend(request, request.output_tokens)
        else:
            self._feed_new_tokens(request, draft_state)
        draft_state.draft_tokens = self.drafter.propose(request, k)
        if request.constraint is not None:
            draft_state.draft_tokens = request.constraint.choose_draft(draft_state.draft_tokens, k)
        return draft_state.draft_tokens

    def _feed_new_tokens(self, request: Request, draft_state: DraftState) -> None:
        new_tokens = request.tokens[draft_state.num_seen :]
        self.drafter.extend(request, new_tokens)
        draft_state.num_seen += len(new_tokens)
        draft_tokens, draft_state.draft_tokens = draft_state.draft_tokens[: len(new_tokens)], ()
        if draft_tokens and draft_tokens[0] != ON_DEVICE:
            right = count_matching_prefix(draft_tokens, new_tokens)
            if self.controller is not None:
                self.controller.record_acceptance(draft_state.streak_class, len(draft_tokens), right)
            draft_state.streak = right + (draft_state.streak or 0) * (right == len(draft_tokens))

    def _make_offer(self, request: Request, draft_tokens: Sequence[int]) -> Offer:
        draft_state = self.draft_states.get(request)
        return Offer(len(draft_tokens), UNKNOWN if draft_state is None else draft_state.streak_class)

    # ------------------------------------------------------------ results of a step

    def record_step(self, results: Sequence[RowResult], arrived: float, was_awaited: bool) -> None:
        """Record the results of a step with these rows.

        arrived: when they came, seconds without those of prefill.
        was_awaited: the next step is planned after them.
        """
        for result in results:
            if result.tokens:
                self._count_row(result)
        decoded = [result for result in results if not result.is_prompt]
        self._report_step_time(decoded, StepArrival(arrived, was_awaited, len(decoded) < len(results)))
        if self.controller is not None and not was_awaited:
            self._draft_shadows(results)

    def forget(self, request: Request) -> None:
        """Forget a request that has finished or was aborted."""
        if (draft_state := self.draft_states.pop(request, None)) is not None:
            self._feed_new_tokens(request, draft_state)
            self.drafter.end(request)

    def _count_row(self, result: RowResult) -> None:
        draft_tokens = result.scheduled.draft_tokens
        if result.is_prompt:
            return
        self.passes += 1
        self.emitted += result.num_sampled
        if draft_tokens:
            self._count_accepted(draft_tokens, result.num_sampled)

    def _count_accepted(self, draft_tokens: Sequence[int], emitted: int) -> None:
        self.drafted += len(draft_tokens)
        for i in range(min(emitted, len(draft_tokens))):
            self.judged[i] += 1
            self.right[i] += i < emitted - 1
        if self.controller is not None and draft_tokens[0] == ON_DEVICE:
            self.controller.record_acceptance(UNKNOWN, len(draft_tokens), emitted - 1)

    def _report_step_time(self, results: Sequence[RowResult], arrival: StepArrival) -> None:
        """Report the time of a step to the controller: from the last step's results to its own.

        A plain step counts if it overlapped with its neighbours and had no prompts. A verified step counts
        with the host's work on prompts, since no step on the device hides it.
        """
        before, self.last_arrival = self.last_arrival, arrival
        if before is None or not results or self.controller is None:
            return
        seconds, has_prompts = arrival.seconds - before.seconds, before.has_prompts or arrival.has_prompts
        if before.was_awaited:
            draft_counts = [len(row.scheduled.draft_tokens) for row in results]
            tokens = sum(row.num_sampled for row in results)
            self.controller.record_speculative(draft_counts, tokens, seconds, has_prompts)
        elif not (arrival.was_awaited or has_prompts):
            self.controller.record_plain(len(results), seconds)

    def _draft_shadows(self, results: Sequence[RowResult]) -> None:
        """Draft for a few requests while steps are plain, once in STEPS_BETWEEN_SHADOWS steps. The device is
        busy meanwhile."""
        self.plain_steps += 1
        if self.plain_steps % STEPS_BETWEEN_SHADOWS or self.drafter == DEVICE_DRAFTER:
            return
        first = self.plain_steps // STEPS_BETWEEN_SHADOWS * SHADOW_REQUESTS
        for result in [
            results[(first + i) % len(results)] for i in range(min(SHADOW_REQUESTS, len(results)))
        ]:
            if not result.is_prompt and not result.scheduled.request.is_finished:
                draft_tokens = self._propose(result.scheduled.request, self.k)
                self.shadow_offers.append(self._make_offer(result.scheduled.request, draft_tokens))
        assert self.controller is not None
        self.controller.learn_shadow_offers(len(results), self.shadow_offers)

    def report(self) -> dict[str, Any]:
        """Return the draft tokens verified and accepted, the share accepted by position, and the tokens that
        a pass over a row gives."""
        return {
            "drafted": self.drafted,
            "accepted": sum(self.right),
            "acceptance": [r / j for r, j in zip(self.right, self.judged, strict=True) if j],
            "tokens_per_pass": self.emitted / max(self.passes, 1),
        }


def count_matching_prefix(draft_tokens: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the number of leading draft tokens that equal the sampled tokens."""
    return next(
        (i for i, (a, b) in enumerate(zip(draft_tokens, tokens, strict=False)) if a != b), len(draft_tokens)
    )
