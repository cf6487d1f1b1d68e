"""Replay of a log's requests, in another order and in other batches. Batch invariance makes the bits
equal."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ....checkpoints.adapters.adapter import Adapter
from ....sampling.params import SamplingParams, request_knobs
from ....sampling.state import check_allowed_tokens
from ...engine.core.request import Request
from ...llm.audit.entry import scores_entry
from ...llm.audit.facts import engine_facts, hash_tokenizer, hash_weights
from ...llm.llm import LLM
from ...llm.subscription import Subscription
from ...text.outputs import CUT_REASONS
from ...text.tokenizer.stop_strings import StopStrings
from .claims import AuditEntry, Claim, Claims, Span
from .verdict import Verdict, VerificationReport

MAX_REPLAYS = 512  # requests in the engine at a time
ClaimedScores = Mapping[str, Sequence[Any]]
SHUFFLE_SEED = 20240817  # of the replays' order


class Replay(NamedTuple):
    """A span of a claim to be computed again."""

    claim: Claim
    span: Span


class LogVerifier:
    """Verifies claims with an engine. It can verify claims that were made with its facts and weights."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.facts = engine_facts(llm.engine, llm.options)
        self.weights_hash = hash_weights(llm.engine.params)
        self.tokenizer_hash = hash_tokenizer(llm.tokenizer)

    def verify_claims(
        self,
        claims: Claims,
        sample: int | None = None,
        anyway: bool = False,
    ) -> VerificationReport:
        """Return a verdict on each request, or on `sample` random ones. With `anyway`, requests that were
        made with other facts are replayed too."""
        chosen = claims.requests
        if sample is not None and sample < len(chosen):
            picked = set(random.SystemRandom().sample(range(len(chosen)), sample))
            chosen = [claim for i, claim in enumerate(chosen) if i in picked]
        verdicts = {claim.line: self._initial_verdict(claim, anyway) for claim in chosen}
        replays = [Replay(c, s) for c in chosen if not (v := verdicts[c.line]).differences for s in v.spans]
        random.Random(SHUFFLE_SEED).shuffle(replays)
        for i in range(0, len(replays), MAX_REPLAYS):
            differences = self._run_replays(replays[i : i + MAX_REPLAYS])
            for line, line_differences in differences.items():
                verdicts[line].differences.extend(line_differences)
        return VerificationReport(list(verdicts.values()), claims)

    def _initial_verdict(self, claim: Claim, anyway: bool) -> Verdict:
        """Return a claim's verdict before its replay: obstacles, contradictions, and the spans to replay."""
        foreign = self._foreign_facts(claim)
        reasons = list(self._find_obstacles(claim)) + ([foreign] if foreign and not anyway else [])
        spans = [] if reasons else self._replayable_spans(claim)
        num_others = sum(s.end - s.first for s in claim.spans if s not in self._replayable_spans(claim))
        if num_others:
            reasons.append(f"{num_others} of {len(claim.entry.tokens)} tokens were made by other weights")
        entry = claim.entry
        verdict = Verdict(claim.line, entry.id, entry.index, reasons, spans, foreign, entry.known)
        if spans or not claim.spans:
            verdict.differences.extend(self._find_impossible_values(entry))
        return verdict

    def _find_obstacles(self, claim: Claim) -> Iterator[str]:
        """Yield the reasons why this engine cannot verify a claim."""
        if claim.start is None:
            yield "the line of its start is missing"
            return
        yield from claim.start.outside_contract
        adapter = claim.entry.adapter
        if adapter is not None and self._find_adapter(claim.entry) is None:
            yield f"adapter {adapter.name!r} ({adapter.digest[:8]}) is not here: give it with --lora-modules"
        if claim.entry.end > (max_model_len := self.llm.engine.sizes.max_model_len):
            yield f"it may have {claim.entry.end} tokens, the engine here has max_model_len {max_model_len}"
        if claim.entry.finish_reason == "error":
            yield "the model computed NaN for it, and a replay compares numbers alone"
        textual = claim.entry.params.get("stop") or claim.entry.params.get("structured_outputs")
        if textual and claim.start.tokenizer != self.tokenizer_hash:
            yield "the tokenizer, in whose text stop strings and grammars are read, is another"

    def _foreign_facts(self, claim: Claim) -> str:
        """Return the facts in which a claim's start differs from this engine, as a reason; "" if none."""
        if claim.start is None:
            return ""
        claimed_facts = claim.start.facts
        names = [n for n in {**claimed_facts, **self.facts} if claimed_facts.get(n) != self.facts.get(n)]
        return f"made with other {', '.join(names)}" if names else ""

    def _replayable_spans(self, claim: Claim) -> list[Span]:
        """Return a claim's spans that were generated by this engine's weights."""
        made_by = {} if claim.start is None else claim.start.versions
        return [span for span in claim.spans if made_by.get(span.version) == self.weights_hash]

    def _find_impossible_values(self, entry: AuditEntry) -> Iterator[str]:
        """Yield the contradictions in a line: no engine of this model can have written it."""
        vocabulary = range(self.llm.config.vocab_size)
        if wrong := [t for t in (*entry.prompt, *entry.tokens) if t not in vocabulary]:
            yield f"token id {wrong[0]}, which the vocabulary lacks"
        yield from entry.find_contradictions()

    def _find_adapter(self, entry: AuditEntry) -> Adapter | None:
        """Return the served adapter with the same weights as a request's adapter. Names may differ."""
        registry = self.llm.input_processor.adapter_registry
        return (
            None
            if registry is None or entry.adapter is None
            else registry.find_by_digest(entry.adapter.digest)
        )

    # ------------------------------------------------------------ run again

    def _run_replays(self, replays: Sequence[Replay]) -> dict[int, list[str]]:
        """Run the spans again. Returns the differences by the claims' line numbers."""
        differences: dict[int, list[str]] = defaultdict(list)
        subscriptions: list[tuple[Replay, Subscription]] = []
        for i, replay in enumerate(replays):
            try:
                subscriptions.append((replay, self._subscribe(replay, i)))
            except (ValueError, TypeError) as error:
                differences[replay.claim.line].append(f"what was asked: {error}")
        self.llm.session.submit_and_run([subscription for _, subscription in subscriptions])
        for replay, subscription in subscriptions:
            wrong = first_difference(replay.claim.entry, replay.span, subscription.requests[0])
            differences[replay.claim.line].extend([wrong] if wrong else [])
        return differences

    def _subscribe(self, replay: Replay, arrival: int) -> Subscription:
        """Subscribe to a request that generates a span again. Tokens before the span are given. The request
        ends with the span, or as the claim did if the span is the last."""
        entry, span = replay.claim.entry, replay.span
        params = SamplingParams.from_dict(entry.params)
        if span.first > entry.known:
            params = replace(params, prompt_logprobs=None)
        self._check_params(params, entry)
        is_whole = is_last_span(entry, span) and entry.finish_reason not in CUT_REASONS
        request = Request(
            id="",
            prompt=list(entry.prompt),
            params=params,
            seed=entry.seed,
            end=entry.end if is_whole else len(entry.prompt) + span.end,
            stop_ids=entry.stop_ids,
            eos_ids=entry.eos_ids,
            bad_words=entry.bad_words,
            detokenizer=self.llm.input_processor.make_detokenizer(
                params, entry.prompt, StopStrings(params.stop_strings)
            ),
            arrival=arrival,
            score_from=entry.score_from,
            max_prefill_delay=math.inf,
            constraint=self.llm.input_processor.make_constraint(params, len(entry.prompt)),
            adapter=self._find_adapter(entry),
        )
        request.append_resumed_tokens(entry.tokens[: span.first])
        request.advance_grammar()
        if request.is_finished:
            raise ValueError(f"it ends after {request.num_output_tokens} tokens")
        return Subscription([request])

    def _check_params(self, params: SamplingParams, entry: AuditEntry) -> None:
        """Raise ValueError for sampling parameters that this engine does not support."""
        V = self.llm.config.vocab_size
        stops, words, processors = entry.stop_ids, entry.bad_words, self.llm.engine.sizes.processors
        row_options = {"bad_words": words, "processors": processors}
        request_knobs(params, seed=entry.seed, stop_ids=stops, prompt_len=len(entry.prompt), **row_options)
        check_allowed_tokens(params, V, stops, words)


def first_difference(entry: AuditEntry, span: Span, request: Request) -> str:
    """Name the first token or score in which a span differs from its replay; "" if it does not differ."""
    index = first_mismatch(entry.tokens[span.first : span.end], request.output_tokens[span.first :])
    if index is not None:
        return f"token {span.first + index}"
    top = request.params.logprobs
    wrong = first_score_difference(entry.scores, scores_entry(request.scores, top), "log-probability", span)
    if not wrong and span.first == entry.known:
        scores = scores_entry(request.prompt_scores, request.params.prompt_logprobs)
        num_scores = len(entry.prompt_scores["logprobs"]) if entry.prompt_scores else 0
        prompt_span = Span(0, num_scores if entry.finish_reason in CUT_REASONS else len(request.prompt), 0)
        wrong = first_score_difference(entry.prompt_scores, scores, "prompt log-probability", prompt_span)
    if not wrong and is_last_span(entry, span) and entry.finish_reason not in CUT_REASONS:
        reasons = (entry.finish_reason, entry.stop_reason), (request.finish_reason, request.stop_reason)
        wrong = "" if reasons[0] == reasons[1] else "finish_reason"
    return wrong


def is_last_span(entry: AuditEntry, span: Span) -> bool:
    return span.end == len(entry.tokens)


def first_score_difference(
    claimed: ClaimedScores | None, replayed: ClaimedScores | None, what: str, span: Span
) -> str:
    """Name the first position of a span whose scores differ; "" if none does. `what` names the score."""
    plural = what.removesuffix("y") + "ies"
    if (claimed is None) != (replayed is None):
        return f"{plural}: {'none' if claimed is None else 'not asked for'}"
    if claimed is None or replayed is None:
        return ""
    if claimed.keys() != replayed.keys():
        return f"{plural}: {sorted(claimed)}"
    indices = [
        index
        for name in claimed
        if (index := first_mismatch(span_values(claimed[name], span), span_values(replayed[name], span)))
        is not None
    ]
    return f"{what} {span.first + min(indices)}" if indices else ""


def span_values(values: Sequence[Any], span: Span) -> list[Any]:
    return [null_if_not_finite(x) for x in values[span.first : span.end]]


def null_if_not_finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, as JSON writes them in the log."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [null_if_not_finite(x) for x in value] if isinstance(value, list) else value


def first_mismatch(claimed: Sequence[Any], replayed: Sequence[Any]) -> int | None:
    """Return the first index at which two lists differ; None if they are equal."""
    pairs = enumerate(zip(claimed, replayed, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    if index is None and len(claimed) != len(replayed):
        return min(len(claimed), len(replayed))
    return index
