"""A request as the log has it beside the same one run again."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.core.request import Request
from ...llm.audit.entry import scores_of
from .claims import AuditEntry, Span

Scores = Mapping[str, Sequence[Any]]


def difference(entry: AuditEntry, span: Span, request: Request) -> str:
    """The first place in which a span differs from the request that made it again; empty where none does."""
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
    """The first place in a span where scores differ."""
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
    """A number as the log has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [finite(x) for x in value] if isinstance(value, list) else value


def first_of(claimed: Sequence[Any], found: Sequence[Any]) -> int | None:
    """The first place in which two lists differ."""
    pairs = enumerate(zip(claimed, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None and len(claimed) != len(found):
        return min(len(claimed), len(found))
    return place
