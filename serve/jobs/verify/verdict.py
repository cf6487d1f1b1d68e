"""Verdicts on a log's requests and on the log itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .claims import Claims, Span

PROVED, DIFFERS, OPEN = 0, 1, 2  # exit codes: all proved, some differ, some cannot be verified here


@dataclass
class Verdict:
    line: int  # its number, from 1
    id: str
    index: int  # of the completion
    reasons: list[str]  # why it, or a part of it, cannot be verified here
    spans: list[Span] = field(default_factory=list)  # of its tokens that are replayed
    foreign: str = ""  # facts that differ from this engine's: then a difference proves nothing
    given: int = 0  # leading tokens of the output that came with the request
    differences: list[str] = field(default_factory=list)  # from the replay, each with its place

    @property
    def differs(self) -> bool:
        return bool(self.differences) and not self.foreign

    @property
    def is_proved(self) -> bool:
        return not self.differences and not self.reasons

    def __str__(self) -> str:
        found = self.differences if self.differs else [*self.reasons, *self.differences]
        if self.differences and self.foreign:
            found = [self.foreign, *found]
        return f"line {self.line}, request {self.id}, completion {self.index}: {'; '.join(found)}"


@dataclass(frozen=True)
class VerificationReport:
    """Verdicts on requests of a log."""

    verdicts: list[Verdict]
    claims: Claims

    @property
    def proved(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.is_proved]

    @property
    def altered(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.differs]

    @property
    def unproved(self) -> list[Verdict]:
        return [v for v in self.verdicts if not v.is_proved and not v.differs]

    @property
    def code(self) -> int:
        """The exit code."""
        if self.altered or self.claims.broken:
            return DIFFERS
        return OPEN if self.unproved or not self.verdicts else PROVED

    def lines(self) -> Iterator[str]:
        """Yield the report as text, errors first."""
        yield from map(printable, self._lines())

    def _lines(self) -> Iterator[str]:
        claims = self.claims
        yield from (f"altered: line {number}: {wrong}" for number, wrong in claims.broken.items())
        yield from (f"altered: {v}" for v in self.altered)
        yield from (f"not provable here: {v}" for v in self.unproved)
        yield from (f"line {n} was cut off when its process was killed" for n in claims.cut_off)
        total = len(claims.requests)
        of = f" of {total} in the log" if len(self.verdicts) < total else ""
        yield (
            f"{len(self.proved)} of {len(self.verdicts)} requests{of} have the same bits again, "
            f"{len(self.altered)} differ, {len(self.unproved)} cannot be proved here"
        )
        if given := [v.given for v in self.proved if v.given]:
            yield f"of {len(given)} of these {sum(given)} tokens came with the request, and are not proved"
        yield f"the chain {'is broken' if claims.broken else 'is whole'} and ends with {claims.head}"

    def record(self) -> dict[str, Any]:
        """Return the report for JSON."""

        def summary(verdict: Verdict) -> dict[str, Any]:
            own = vars(verdict)
            return {name: own[name] for name in ("line", "id", "index", "reasons", "differences")}

        return {
            "requests": len(self.claims.requests),
            "run": len(self.verdicts),
            "proved": len(self.proved),
            "given": sum(v.given for v in self.proved),
            "altered": [summary(v) for v in self.altered],
            "not_provable": [summary(v) for v in self.unproved],
            "broken": [{"line": n, "wrong": wrong} for n, wrong in self.claims.broken.items()],
            "cut_off": self.claims.cut_off,
            "head": self.claims.head,
        }


def printable(text: str) -> str:
    """Return a text with control characters escaped for a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
