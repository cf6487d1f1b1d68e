"""Traces of workloads: when requests arrive, how long they are, and which prompts begin alike.

Traces are read line by line, in one of three forms: Azure's (Patel et al., arXiv 2311.18677), Mooncake's (Qin
et al., arXiv 2407.00079), or a compact one. They can also be drawn from distributions.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec

BLOCK_TOKENS = 512  # tokens of a block in Mooncake's traces
TokenCount = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
# Up to the year 33658: finite, and never NaN.
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
BlockRanges = Annotated[str, msgspec.Meta(pattern=r"^\s*(\d{1,18}(-\d{1,18})?(\s+|$))*$")]
BlockName = int | str


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request of a trace.

    arrival: seconds.
    prompt_tokens, output_tokens: tokens.
    blocks: names of the prompt's blocks of BLOCK_TOKENS tokens; equal names are equal tokens.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


# ---------------------------------------------------------------- lines of published forms


class Mooncake(msgspec.Struct):
    """A line of JSON in Mooncake's form; `hash_ids` are names of the prompt's blocks."""

    timestamp: Milliseconds
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: tuple[BlockName, ...] | None = None

    def to_entry_and_blocks(self) -> tuple[TraceEntry, Iterable[BlockName]]:
        return TraceEntry(self.timestamp / 1e3, self.input_length, self.output_length), self.hash_ids or ()


class Azure(msgspec.Struct):
    """A row of Azure's table."""

    TIMESTAMP: datetime
    ContextTokens: TokenCount
    GeneratedTokens: TokenCount

    def to_entry_and_blocks(self) -> tuple[TraceEntry, Iterable[BlockName]]:
        at = self.TIMESTAMP if self.TIMESTAMP.tzinfo else self.TIMESTAMP.replace(tzinfo=UTC)
        return TraceEntry(at.timestamp(), self.ContextTokens, self.GeneratedTokens), ()


class Compact(msgspec.Struct):
    """A row of the compact table; `4-7` in `blocks` is 4 5 6 7."""

    arrival_ms: Milliseconds
    prompt: TokenCount
    output: TokenCount
    blocks: BlockRanges | None = None

    def to_entry_and_blocks(self) -> tuple[TraceEntry, Iterable[BlockName]]:
        names = (name for part in (self.blocks or "").split() for name in parse_block_range(part))
        return TraceEntry(self.arrival_ms / 1e3, self.prompt, self.output), names


TRACE_FORMS = "lines of JSON with {}, or a table with {} or {}".format(
    *(", ".join(kind.__struct_fields__) for kind in (Mooncake, Azure, Compact))
)


def parse_block_range(part: str) -> Iterable[int]:
    """Parse a name, or a range of names such as `4-7`."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def read_trace(file: Path) -> Iterator[TraceEntry]:
    """Yield the requests of a trace in any of these forms, lazily. Block names are numbered by their first
    appearance; names beyond the prompt's end are dropped.

    Raises OSError, and ValueError with the line if the file is no trace.
    """
    numbers: dict[BlockName, int] = {}
    first: float | None = None
    with file.open(encoding="utf-8-sig") as lines:
        for line in parse_trace_lines(file, lines):
            entry, names = line.to_entry_and_blocks()
            first = entry.arrival if first is None else first
            names = islice(names, -(-entry.prompt_tokens // BLOCK_TOKENS))
            blocks = tuple(numbers.setdefault(name, len(numbers)) for name in names)
            at = entry.arrival - first if isinstance(line, Azure) else entry.arrival
            yield replace(entry, arrival=at, blocks=blocks)


def parse_trace_lines(file: Path, lines: Iterable[str]) -> Iterator[Mooncake | Azure | Compact]:
    """Yield the lines of a file as records. Raises ValueError for a line that is not of its form."""
    number, text = 0, ""
    try:
        for at, make, row in pair_lines_with_parsers(file, lines):
            number, text = at, str(row).strip()
            yield make(row)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}, line {number}: {error}: {text[:200]!r}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}, after line {number}: {error}; a trace has {TRACE_FORMS}") from None


def pair_lines_with_parsers(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, Any, Any]]:
    """Yield each line's number, its parser, and its content. The first line decides the form: it is a JSON
    object, or has the names of columns."""
    lines = iter(lines)
    start, head = next(((n, text) for n, text in enumerate(lines, 1) if text.strip()), (1, ""))
    if head.lstrip().startswith("{"):
        decode = msgspec.json.Decoder(Mooncake).decode
        yield from ((n, decode, text) for n, text in enumerate(chain([head], lines), start) if text.strip())
    elif head:
        table = csv.DictReader(chain([head], lines))
        kind = choose_table_form(file, table.fieldnames or ())
        make = partial(msgspec.convert, type=kind, strict=False)
        yield from ((start - 1 + table.line_num, make, row) for row in table)


def choose_table_form(file: Path, names: Sequence[str]) -> type[Azure] | type[Compact]:
    """Choose a table's form by its first column. Raises ValueError if it is none of these forms."""
    if "TIMESTAMP" in names:
        return Azure
    if "arrival_ms" in names:
        return Compact
    raise ValueError(f"{file}: columns {', '.join(names):.200} are not those of a trace: {TRACE_FORMS}")


def draw_requests(
    count: int, rate: float, prompt: float, output: float, seed: int = 0
) -> Iterator[TraceEntry]:
    """Draw requests that arrive independently, `rate` a second (a Poisson process). Lengths are lognormal
    around these means, as in conversations. If the rate is infinite, all arrive at once."""
    random, at = Random(seed), 0.0
    for _ in range(count):
        yield TraceEntry(at, draw_lognormal(random, prompt), draw_lognormal(random, output))
        at += random.expovariate(rate) if math.isfinite(rate) else 0.0


def draw_lognormal(random: Random, mean: float, spread: float = 0.8) -> int:
    """Draw a length of at least one token, lognormal around a mean."""
    return max(1, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def speed_up(entries: Iterable[TraceEntry], factor: float) -> Iterator[TraceEntry]:
    """Yield the requests `factor` times as often."""
    return (replace(entry, arrival=entry.arrival / factor) for entry in entries)
