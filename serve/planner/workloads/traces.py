"""Traces of workloads: when requests arrive, how long they are, and which prompts begin alike. They are read
line by line, in the form of Azure (Patel et al., arXiv 2311.18677), of Mooncake (Qin et al., arXiv
2407.00079) or in a compact one, or drawn from distributions."""

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

BLOCK = 512  # tokens that a block's name stands for in Mooncake's traces
Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Millis = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]  # the year 33658: neither infinite nor no number
Ranges = Annotated[str, msgspec.Meta(pattern=r"^\s*(\d{1,18}(-\d{1,18})?(\s+|$))*$")]
Name = int | str


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A line of a trace: arrival in seconds, tokens of prompt and output, and names of the prompt's
    blocks."""

    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


# ---------------------------------------------------------------- lines of published forms


class Mooncake(msgspec.Struct):
    """A line of JSON; names are those of blocks of the prompt."""

    timestamp: Millis
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[Name, ...] | None = None

    def entry(self) -> tuple[TraceEntry, Iterable[Name]]:
        return TraceEntry(self.timestamp / 1e3, self.input_length, self.output_length), self.hash_ids or ()


class Azure(msgspec.Struct):
    """A row of a table."""

    TIMESTAMP: datetime
    ContextTokens: Tokens
    GeneratedTokens: Tokens

    def entry(self) -> tuple[TraceEntry, Iterable[Name]]:
        at = self.TIMESTAMP if self.TIMESTAMP.tzinfo else self.TIMESTAMP.replace(tzinfo=UTC)
        return TraceEntry(at.timestamp(), self.ContextTokens, self.GeneratedTokens), ()


class Compact(msgspec.Struct):
    """A row of a table; of blocks `4-7` stands for 4 5 6 7."""

    arrival_ms: Millis
    prompt: Tokens
    output: Tokens
    blocks: Ranges | None = None

    def entry(self) -> tuple[TraceEntry, Iterable[Name]]:
        names = (name for part in (self.blocks or "").split() for name in names_of(part))
        return TraceEntry(self.arrival_ms / 1e3, self.prompt, self.output), names


FORMS = "lines of JSON with {}, or a table with {} or {}".format(
    *(", ".join(kind.__struct_fields__) for kind in (Mooncake, Azure, Compact))
)


def names_of(part: str) -> Iterable[int]:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def read(file: Path) -> Iterator[TraceEntry]:
    """The lines of a trace in any of these forms, as they are asked for. Names are numbered by their first
    appearance; those behind a prompt's end are left out.

    Raises OSError, and ValueError for what is no trace, with the line.
    """
    numbers: dict[Name, int] = {}
    first: float | None = None
    with file.open(encoding="utf-8-sig") as lines:
        for line in checked(file, lines):
            entry, names = line.entry()
            first = entry.arrival if first is None else first
            names = islice(names, -(-entry.prompt // BLOCK))
            blocks = tuple(numbers.setdefault(name, len(numbers)) for name in names)
            at = entry.arrival - first if isinstance(line, Azure) else entry.arrival
            yield replace(entry, arrival=at, blocks=blocks)


def checked(file: Path, lines: Iterable[str]) -> Iterator[Mooncake | Azure | Compact]:
    """The lines of a file. Raises ValueError for one that is not as its form has it."""
    number, text = 0, ""
    try:
        for at, make, row in rows_of(file, lines):
            number, text = at, str(row).strip()
            yield make(row)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file}, line {number}: {error}: {text[:200]!r}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}, after line {number}: {error}; a trace has {FORMS}") from None


def rows_of(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, Any, Any]]:
    """The number of each line, how it is read, and what is read: by the first of them, which is an object or
    has names of columns."""
    lines = iter(lines)
    start, head = next(((n, text) for n, text in enumerate(lines, 1) if text.strip()), (1, ""))
    if head.lstrip().startswith("{"):
        decode = msgspec.json.Decoder(Mooncake).decode
        yield from ((n, decode, text) for n, text in enumerate(chain([head], lines), start) if text.strip())
    elif head:
        table = csv.DictReader(chain([head], lines))
        kind = form_of(file, table.fieldnames or ())
        make = partial(msgspec.convert, type=kind, strict=False)
        yield from ((start - 1 + table.line_num, make, row) for row in table)


def form_of(file: Path, names: Sequence[str]) -> type[Azure] | type[Compact]:
    """The form whose first column a table has. Raises ValueError if it has that of none."""
    if "TIMESTAMP" in names:
        return Azure
    if "arrival_ms" in names:
        return Compact
    raise ValueError(f"{file}: columns {', '.join(names):.200} are not those of a trace: {FORMS}")


def drawn(count: int, rate: float, prompt: float, output: float, seed: int = 0) -> Iterator[TraceEntry]:
    """Requests that arrive independently, `rate` a second (a Poisson process), with lengths that are
    lognormal around these means, as conversations' are; all at once where the rate is infinite."""
    random, at = Random(seed), 0.0
    for _ in range(count):
        yield TraceEntry(at, lognormal(random, prompt), lognormal(random, output))
        at += random.expovariate(rate) if math.isfinite(rate) else 0.0


def lognormal(random: Random, mean: float, spread: float = 0.8) -> int:
    return max(1, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def faster(entries: Iterable[TraceEntry], times: float) -> Iterator[TraceEntry]:
    """Return the same requests `times` times as often."""
    return (replace(entry, arrival=entry.arrival / times) for entry in entries)
