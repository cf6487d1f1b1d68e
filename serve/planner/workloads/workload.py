"""A workload and its averages: lengths, shared prompts, and rate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .traces import BLOCK, TraceEntry, faster


@dataclass(frozen=True)
class Workload:
    """Requests in order of their arrival, that stand for all."""

    entries: Sequence[TraceEntry]

    @classmethod
    def of(cls, entries: Iterable[TraceEntry]) -> "Workload":
        """Requests in any order, of which the first arrives at 0."""
        own = sorted(entries, key=lambda e: e.arrival)
        return cls([replace(e, arrival=e.arrival - own[0].arrival) for e in own])

    @cached_property
    def rate(self) -> float:
        """Requests a second; infinite where all are there at once."""
        seconds = self.entries[-1].arrival - self.entries[0].arrival
        return (len(self.entries) - 1) / seconds if seconds > 0 else float("inf")

    @cached_property
    def prompt(self) -> float:
        return sum(e.prompt for e in self.entries) / len(self.entries)

    @cached_property
    def output(self) -> float:
        return sum(e.output for e in self.entries) / len(self.entries)

    @cached_property
    def longest(self) -> int:
        return max(map(length, self.entries))

    @cached_property
    def context(self) -> float:
        """Tokens in the cache of a row of decode, of all such rows on average."""
        return sum(e.output * (e.prompt + e.output / 2) for e in self.entries) / (
            self.output * len(self.entries)
        )

    @cached_property
    def shared(self) -> float:
        """Share of the prompts' tokens that begin as an earlier prompt does, were all of them kept."""
        seen: set[tuple[int, int]] = set()
        found = 0
        for entry in self.entries:
            blocks = [(i, name) for i, name in enumerate(entry.blocks)]
            found += BLOCK * sum(block in seen for block in blocks)
            seen.update(blocks)
        return min(found / (self.prompt * len(self.entries)), 1.0)

    def within(self, tokens: int) -> "Workload":
        """Return the requests of at most `tokens` tokens."""
        return self if self.longest <= tokens else Workload([e for e in self.entries if length(e) <= tokens])

    def faster(self, times: float) -> "Workload":
        """Return the same requests `times` times as often."""
        return self if times == 1 else Workload(list(faster(self.entries, times)))

    def repeated(self, count: int) -> "Workload":
        """Return at least `count` requests: the same again after their end, with blocks of their own."""
        entries, span = list(self.entries), self.entries[-1].arrival - self.entries[0].arrival
        gap = span / max(len(entries) - 1, 1)
        apart = 1 + max((name for e in entries for name in e.blocks), default=0)
        turn = 1
        while len(entries) < count:
            later, names = turn * (span + gap), turn * apart
            entries += [
                replace(e, arrival=e.arrival + later, blocks=tuple(name + names for name in e.blocks))
                for e in self.entries
            ]
            turn += 1
        return Workload(entries[: max(count, len(self.entries))])


def length(entry: TraceEntry) -> int:
    """Tokens that a request ends with."""
    return entry.prompt + entry.output
