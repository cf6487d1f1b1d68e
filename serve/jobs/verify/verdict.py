"""Verdicts on a log's requests and on the log itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .claims import Claims, Span

# exit codes: all proved, some differ, some cannot be verified here
PROVED_CODE, ALTERED_CODE, UNPROVED_CODE = 0, 1, 2


@dataclass
class Verdict:
    """Result of the verification of one request.

    line: its number in the log, from 1
    id: of the request
    index: of the completion
    reasons: why the request, or a part of it, cannot be verified here
    spans: spans of its tokens that are replayed
    foreign_facts: facts that differ from this engine's; a difference then proves nothing
    num_given: number of leading output tokens that came with the request
    differences: differences from the replay, each with its position
    """

    line: int
    id: str
    index: int
    reasons: list[str]
    spans: list[Span] = field(default_factory=list)
    foreign_facts: str = ""
    num_given: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def is_altered(self) -> bool:
        return bool(self.differences) and not self.foreign_facts

    @property
    def is_proved(self) -> bool:
        return not self.differences and not self.reasons

    def __str__(self) -> str:
        problems = self.differences if self.is_altered else [*self.reasons, *self.differences]
        if self.differences and self.foreign_facts:
            problems = [self.foreign_facts, *problems]
        return f"line {self.line}, request {self.id}, completion {self.index}: {'; '.join(problems)}"


@dataclass(frozen=True)
class VerificationReport:
    """Verdicts on requests of a log, and the log's claims."""

    verdicts: list[Verdict]
    claims: Claims

    @property
    def proved_verdicts(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.is_proved]

    @property
    def altered_verdicts(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.is_altered]

    @property
    def unproved_verdicts(self) -> list[Verdict]:
        return [v for v in self.verdicts if not v.is_proved and not v.is_altered]

    @property
    def exit_code(self) -> int:
        """Exit code: `ALTERED_CODE`, `UNPROVED_CODE` or `PROVED_CODE`."""
        if self.altered_verdicts or self.claims.broken:
            return ALTERED_CODE
        return UNPROVED_CODE if self.unproved_verdicts or not self.verdicts else PROVED_CODE

    def format_lines(self) -> Iterator[str]:
        """Yield the report as lines of text, errors first."""
        yield from map(escape_controls, self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        claims = self.claims
        yield from (f"altered: line {number}: {wrong}" for number, wrong in claims.broken.items())
        yield from (f"altered: {v}" for v in self.altered_verdicts)
        yield from (f"not provable here: {v}" for v in self.unproved_verdicts)
        yield from (f"line {n} was cut off when its process was killed" for n in claims.cut_off)
        total = len(claims.requests)
        of_total = f" of {total} in the log" if len(self.verdicts) < total else ""
        num_proved, num_altered = len(self.proved_verdicts), len(self.altered_verdicts)
        yield (
            f"{num_proved} of {len(self.verdicts)} requests{of_total} have the same bits again, "
            f"{num_altered} differ, {len(self.unproved_verdicts)} cannot be proved here"
        )
        if given_counts := [v.num_given for v in self.proved_verdicts if v.num_given]:
            with_given, num_given = len(given_counts), sum(given_counts)
            yield f"of {with_given} of these {num_given} tokens came with the request, and are not proved"
        yield f"the chain {'is broken' if claims.broken else 'is whole'} and ends with {claims.head}"

    def to_record(self) -> dict[str, Any]:
        """Return the report as an object for JSON."""

        def summary(verdict: Verdict) -> dict[str, Any]:
            values = vars(verdict)
            return {name: values[name] for name in ("line", "id", "index", "reasons", "differences")}

        return {
            "requests": len(self.claims.requests),
            "run": len(self.verdicts),
            "proved": len(self.proved_verdicts),
            "given": sum(v.num_given for v in self.proved_verdicts),
            "altered": [summary(v) for v in self.altered_verdicts],
            "not_provable": [summary(v) for v in self.unproved_verdicts],
            "broken": [{"line": n, "wrong": wrong} for n, wrong in self.claims.broken.items()],
            "cut_off": self.claims.cut_off,
            "head": self.claims.head,
        }


def escape_controls(text: str) -> str:
    """Escape the control characters of a text, so that it can be printed on a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
