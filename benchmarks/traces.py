"""Requests to measure with: lengths, arrivals and shared prefixes of real traces, scaled to the machine, with
random tokens.

The files and where they come from are described in `traces/README.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from duetto.serve.planner.workloads import traces
from duetto.serve.planner.workloads.traces import BLOCK_TOKENS, TraceEntry

FOLDER = Path(__file__).parent / "traces"
AZURE, MOONCAKE = FOLDER / "azure-conv.csv", FOLDER / "mooncake-conversation.csv"
RESERVED = 3  # token ids below are never in a prompt: tokenizers use them for marks


@dataclass(frozen=True)
class Request:
    """What an engine is asked: token ids to continue by exactly `output` tokens, `arrival` seconds after the
    start."""

    prompt: list[int]
    output: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Scale:
    """How a trace is fitted to a machine: lengths divided, and cut at a number of tokens."""

    divisor: int = 1
    prompt: int = 8192
    output: int = 1024

    def __str__(self) -> str:
        return f"lengths / {self.divisor}, at most {self.prompt} + {self.output} tokens"

    def __call__(self, entry: TraceEntry) -> TraceEntry:
        def size(n: int, most: int) -> int:
            return min(max(round(n / self.divisor), 1), most)

        return replace(
            entry,
            prompt_tokens=size(entry.prompt_tokens, self.prompt),
            output_tokens=size(entry.output_tokens, self.output),
        )


def read(file: Path) -> list[TraceEntry]:
    """The lines of a trace in the compact form, or of Azure's (.csv) or Mooncake's (.jsonl) own files.

    Raises OSError, and ValueError for another form.
    """
    return list(traces.read_trace(file))


def conversations(
    entries: Sequence[TraceEntry], count: int, longest: int, turns: int = 1
) -> list[TraceEntry]:
    """Whole conversations of at least `turns` requests, in the order in which they begin until they make
    `count` requests, by arrival.

    Requests of more than `longest` prompt tokens are left out. A conversation shares its prompts' second
    block.
    """
    found: dict[int, list[TraceEntry]] = {}
    for i, entry in enumerate(entries):
        if entry.prompt_tokens <= longest:
            found.setdefault(entry.blocks[1] if len(entry.blocks) > 1 else -i - 1, []).append(entry)
    chosen: list[TraceEntry] = []
    for conversation in found.values():
        if len(chosen) < count and len(conversation) >= turns:
            chosen += conversation
    return sorted(chosen, key=lambda e: e.arrival)


def at_once(entries: Sequence[TraceEntry], vocabulary: int) -> list[Request]:
    """Requests with random tokens that all arrive at the start."""
    draw = np.random.default_rng(0).integers
    return [Request(draw(RESERVED, vocabulary, e.prompt_tokens).tolist(), e.output_tokens) for e in entries]


def replayed(entries: Sequence[TraceEntry], vocabulary: int, rate: float) -> list[Request]:
    """The same at the trace's own moments, stretched so that `rate` requests arrive a second on average."""
    stretch = len(entries) / rate / max(entries[-1].arrival, 1e-9)
    requests = at_once(entries, vocabulary)
    return [replace(r, arrival=e.arrival * stretch) for r, e in zip(requests, entries, strict=True)]


def with_prefixes(entries: Sequence[TraceEntry], vocabulary: int, divisor: int) -> list[Request]:
    """Requests that all arrive at the start and share the tokens of the blocks that they share, of BLOCK /
    divisor tokens each."""

    def block(name: int) -> list[int]:
        return (
            np.random.default_rng([1, name]).integers(RESERVED, vocabulary, BLOCK_TOKENS // divisor).tolist()
        )

    def prompt(entry: TraceEntry) -> list[int]:
        return [token for name in entry.blocks for token in block(name)][
            : max(entry.prompt_tokens // divisor, 1)
        ]

    return [Request(prompt(e), max(e.output_tokens // divisor, 1)) for e in entries]
