"""A workload and its averages: lengths, shared prompts, and rate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .traces import BLOCK_TOKENS, TraceEntry, speed_up


@dataclass(frozen=True)
class Workload:
    """Requests in order of their arrival, a sample of all."""

    entries: Sequence[TraceEntry]

    @classmethod
    def from_entries(cls, entries: Iterable[TraceEntry]) -> "Workload":
        """Sort requests by arrival; the first arrives at 0."""
        ordered = sorted(entries, key=lambda e: e.arrival)
        return cls([replace(e, arrival=e.arrival - ordered[0].arrival) for e in ordered])

    @cached_property
    def rate(self) -> float:
        """Return the requests a second; infinite if all arrive at once."""
        seconds = self.entries[-1].arrival - self.entries[0].arrival
        return (len(self.entries) - 1) / seconds if seconds > 0 else float("inf")

    @cached_property
    def prompt(self) -> float:
        """Return the mean tokens of a prompt."""
        return sum(e.prompt_tokens for e in self.entries) / len(self.entries)

    @cached_property
    def output(self) -> float:
        """Return the mean tokens of an output."""
        return sum(e.output_tokens for e in self.entries) / len(self.entries)

    @cached_property
    def longest(self) -> int:
        """Return the most tokens that a request ends with."""
        return max(map(entry_tokens, self.entries))

    @cached_property
    def mean_context(self) -> float:
        """Return the mean number of cached tokens of a row of decode, over all such rows."""
        return sum(e.output_tokens * (e.prompt_tokens + e.output_tokens / 2) for e in self.entries) / (
            self.output * len(self.entries)
        )

    @cached_property
    def shared(self) -> float:
        """Return the share of prompt tokens in blocks that an earlier prompt has at the same index. It is the
        prefix cache's hit rate if nothing is evicted."""
        seen: set[tuple[int, int]] = set()
        shared_tokens = 0
        for entry in self.entries:
            blocks = [(i, name) for i, name in enumerate(entry.blocks)]
            shared_tokens += BLOCK_TOKENS * sum(block in seen for block in blocks)
            seen.update(blocks)
        return min(shared_tokens / (self.prompt * len(self.entries)), 1.0)

    def with_max_tokens(self, max_tokens: int) -> "Workload":
        """Return the requests of at most `max_tokens` tokens."""
        return (
            self
            if self.longest <= max_tokens
            else Workload([e for e in self.entries if entry_tokens(e) <= max_tokens])
        )

    def with_speed(self, factor: float) -> "Workload":
        """Return the workload with its requests `factor` times as often."""
        return self if factor == 1 else Workload(list(speed_up(self.entries, factor)))

    def repeat(self, count: int) -> "Workload":
        """Return at least `count` requests. The workload is repeated after its end, each time with other
        block names."""
        entries, span = list(self.entries), self.entries[-1].arrival - self.entries[0].arrival
        gap = span / max(len(entries) - 1, 1)
        name_stride = 1 + max((name for e in entries for name in e.blocks), default=0)
        repetition = 1
        while len(entries) < count:
            delay, name_offset = repetition * (span + gap), repetition * name_stride
            entries += [
                replace(e, arrival=e.arrival + delay, blocks=tuple(name + name_offset for name in e.blocks))
                for e in self.entries
            ]
            repetition += 1
        return Workload(entries[: max(count, len(self.entries))])


def entry_tokens(entry: TraceEntry) -> int:
    """Return the tokens that a request ends with."""
    return entry.prompt_tokens + entry.output_tokens
