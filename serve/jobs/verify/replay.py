"""Replay of a log's requests in another order and in other batches: batch invariance makes the bits the
same."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ....checkpoints.adapters.adapter import Adapter
from ....sampling.params import SamplingParams, knobs_row
from ....sampling.state import check_choice
from ...llm.audit.entry import scores_of
from ...llm.audit.facts import facts_of, weights_hash, words_hash
from ...llm.llm import LLM
from ...llm.request_group import RequestGroup
from .claims import AuditEntry, Claim, Claims, Span
from .verdict import Verdict, VerificationReport

TOGETHER = 512  # requests in the engine at a time
Scores = Mapping[str, Sequence[Any]]
SEED = 20240817  # of their order


class Replay(NamedTuple):
    """A span of a claim to be computed again."""

    claim: Claim
    span: Span


class Prover:
    """Verifies claims with an engine: those made with its facts and its weights."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.facts = facts_of(llm.engine, llm.options)
        self.weights, self.words = weights_hash(llm.engine.params), words_hash(llm.tokenizer)

    def prove(
        self,
        claims: Claims,
        sample: int | None = None,
        anyway: bool = False,
    ) -> VerificationReport:
        """Return a verdict on each request, or on a random `sample` of them. `anyway` also replays those made
        with other facts."""
        chosen = claims.requests
        if sample is not None and sample < len(chosen):
            picked = set(random.SystemRandom().sample(range(len(chosen)), sample))
            chosen = [claim for i, claim in enumerate(chosen) if i in picked]
        verdicts = {claim.line: self._before(claim, anyway) for claim in chosen}
        jobs = [Replay(c, s) for c in chosen if not (v := verdicts[c.line]).differences for s in v.spans]
        random.Random(SEED).shuffle(jobs)
        for i in range(0, len(jobs), TOGETHER):
            found = self._run(jobs[i : i + TOGETHER])
            for line, wrongs in found.items():
                verdicts[line].differences.extend(wrongs)
        return VerificationReport(list(verdicts.values()), claims)

    def _before(self, claim: Claim, anyway: bool) -> Verdict:
        """Return a claim's verdict before any replay, with the spans to replay."""
        foreign = self._foreign(claim)
        reasons = list(self._against(claim)) + ([foreign] if foreign and not anyway else [])
        spans = [] if reasons else self._spans(claim)
        others = sum(s.end - s.first for s in claim.spans if s not in self._spans(claim))
        if others:
            reasons.append(f"{others} of {len(claim.entry.tokens)} tokens were made by other weights")
        entry = claim.entry
        verdict = Verdict(claim.line, entry.id, entry.index, reasons, spans, foreign, entry.known)
        if spans or not claim.spans:
            verdict.differences.extend(self._impossible(entry))
        return verdict

    def _against(self, claim: Claim) -> Iterator[str]:
        """Yield the reasons why this engine cannot verify a claim."""
        if claim.start is None:
            yield "the line of its start is missing"
            return
        yield from claim.start.outside_contract
        named = claim.entry.adapter
        if named is not None and self._adapter(claim.entry) is None:
            yield f"adapter {named.name!r} ({named.digest[:8]}) is not here: give it with --lora-modules"
        if claim.entry.end > (most := self.llm.engine.sizes.max_model_len):
            yield f"it may have {claim.entry.end} tokens, the engine here has max_model_len {most}"
        textual = claim.entry.params.get("stop") or claim.entry.params.get("structured_outputs")
        if textual and claim.start.tokenizer != self.words:
            yield "the tokenizer, in whose text stop strings and grammars are read, is another"

    def _foreign(self, claim: Claim) -> str:
        """Return the names of the facts in which a claim's start differs from this engine, as a reason."""
        if claim.start is None:
            return ""
        theirs = claim.start.facts
        names = [n for n in {**theirs, **self.facts} if theirs.get(n) != self.facts.get(n)]
        return f"made with other {', '.join(names)}" if names else ""

    def _spans(self, claim: Claim) -> list[Span]:
        """Return the spans that this engine's weights have generated."""
        made_by = {} if claim.start is None else claim.start.versions
        return [span for span in claim.spans if made_by.get(span.version) == self.weights]

    def _impossible(self, entry: AuditEntry) -> Iterator[str]:
        """Yield the contradictions in a line, which no engine of this model can have written."""
        words = range(self.llm.config.vocab_size)
        if wrong := [t for t in (*entry.prompt, *entry.tokens) if t not in words]:
            yield f"token id {wrong[0]}, which the vocabulary lacks"
        yield from entry.impossible()

    def _adapter(self, entry: AuditEntry) -> Adapter | None:
        """Return the adapter with the weights of a request's, whatever its name is here."""
        served = self.llm.input_processor.adapters
        return None if served is None or entry.adapter is None else served.equal_to(entry.adapter.digest)

    # ------------------------------------------------------------ run again

    def _run(self, jobs: Sequence[Replay]) -> dict[int, list[str]]:
        """Return the differences by the line numbers of claims."""
        found: dict[int, list[str]] = defaultdict(list)
        made: list[tuple[Replay, RequestGroup]] = []
        for i, job in enumerate(jobs):
            try:
                made.append((job, self._group(job, i)))
            except (ValueError, TypeError) as error:
                found[job.claim.line].append(f"what was asked: {error}")
        self.llm.session.complete([partial(named, group) for _, group in made])
        for job, group in made:
            wrong = difference(job.claim.entry, job.span, group)
            found[job.claim.line].extend([wrong] if wrong else [])
        return found

    def _group(self, job: Replay, place: int) -> RequestGroup:
        """Return a span's request: earlier tokens are given, and it ends with the span unless that is the
        last."""
        entry, span = job.claim.entry, job.span
        params = SamplingParams.from_dict(entry.params)
        if span.first > entry.known:
            params = replace(params, prompt_logprobs=None)
        self._check(params, entry)
        whole = is_last(entry, span) and entry.finish_reason != "abort"
        group = RequestGroup.of_one(
            prompt=list(entry.prompt),
            params=params,
            seed=entry.seed,
            end=entry.end if whole else len(entry.prompt) + span.end,
            stop_ids=entry.stop_ids,
            eos_ids=entry.eos_ids,
            bad_words=entry.bad_words,
            text=self.llm.input_processor.detokenizer(params, entry.prompt),
            arrival=place,
            score_from=entry.score_from,
            patience=math.inf,
            constraint=self.llm.input_processor.constraint(params, len(entry.prompt)),
            adapter=self._adapter(entry),
        )
        (request,) = group.requests
        request.resume(entry.tokens[: span.first])
        request.obey()
        if request.finished:
            raise ValueError(f"it ends after {request.generated} tokens")
        return group

    def _check(self, params: SamplingParams, entry: AuditEntry) -> None:
        """Raise ValueError for parameters that no row of the engine can have."""
        V = self.llm.config.vocab_size
        params.check_vocabulary(V)
        stops, words, own = entry.stop_ids, entry.bad_words, self.llm.engine.sizes.processors
        given = {"bad_words": words, "processors": own}
        knobs_row(params, seed=entry.seed, stop_ids=stops, prompt_len=len(entry.prompt), **given)
        check_choice(params, V, stops, words)


def named(group: RequestGroup, id: str) -> RequestGroup:
    group.id = group.requests[0].id = id
    return group


def difference(entry: AuditEntry, span: Span, group: RequestGroup) -> str:
    """Return the first place in which a span differs from its replay; "" if none does."""
    (request,) = group.requests
    found = first_of(entry.tokens[span.first : span.end], request.outputs[span.first :])
    if found is not None:
        return f"token {span.first + found}"
    top = request.params.logprobs
    wrong = differing_scores(entry.scores, scores_of(request.scores, top), "log-probability", span)
    if not wrong and span.first == entry.known:
        own = scores_of(request.prompt_scores, request.params.prompt_logprobs)
        most = len(entry.prompt_scores["logprobs"]) if entry.prompt_scores else 0
        whole = Span(0, most if entry.finish_reason == "abort" else len(request.prompt), 0)
        wrong = differing_scores(entry.prompt_scores, own, "prompt log-probability", whole)
    if not wrong and is_last(entry, span) and entry.finish_reason != "abort":
        reasons = (entry.finish_reason, entry.stop_reason), (request.finish_reason, request.stop_reason)
        wrong = "" if reasons[0] == reasons[1] else "finish_reason"
    return wrong


def is_last(entry: AuditEntry, span: Span) -> bool:
    return span.end == len(entry.tokens)


def differing_scores(claimed: Scores | None, found: Scores | None, what: str, span: Span) -> str:
    """Return the first place in a span where scores differ; "" if none does."""
    plural = what.removesuffix("y") + "ies"
    if (claimed is None) != (found is None):
        return f"{plural}: {'none' if claimed is None else 'not asked for'}"
    if claimed is None or found is None:
        return ""
    if claimed.keys() != found.keys():
        return f"{plural}: {sorted(claimed)}"
    places = [
        place
        for name in claimed
        if (place := first_of(within(claimed[name], span), within(found[name], span))) is not None
    ]
    return f"{what} {span.first + min(places)}" if places else ""


def within(values: Sequence[Any], span: Span) -> list[Any]:
    return [finite(x) for x in values[span.first : span.end]]


def finite(value: Any) -> Any:
    """Return a number as the log has it: null if it is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [finite(x) for x in value] if isinstance(value, list) else value


def first_of(claimed: Sequence[Any], found: Sequence[Any]) -> int | None:
    """Return the first place in which two lists differ; None if they are equal."""
    pairs = enumerate(zip(claimed, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None and len(claimed) != len(found):
        return min(len(claimed), len(found))
    return place
