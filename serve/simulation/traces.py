"""What a workload is: when requests arrive, how long they are, and which prompts begin alike. Traces are read
line by line, in Azure's form (Patel et al., arXiv 2311.18677), Mooncake's (Qin et al., arXiv 2407.00079) and
a compact one; or drawn from distributions."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 512  # tokens that a block's name stands for in Mooncake's traces
COMPACT = {"arrival_ms", "prompt", "output"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a trace: arrival in seconds, tokens of prompt and output, and names of the prompt's
    blocks."""

    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read(file: Path) -> Iterator[Entry]:
    """The lines of a trace: Mooncake's (.jsonl), Azure's, or the compact form (.csv), as they are asked for.

    Raises OSError, and ValueError for another form, with the line's number.
    """
    with file.open() as lines:
        first = math.nan
        for number, make, row in rows_of(file, lines):
            try:
                entry = make(row)
                if entry.prompt < 1 or entry.output < 1:
                    raise ValueError(f"{entry.prompt} and {entry.output} tokens are not allowed: 1 or more")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number}: {error!r} is not what a trace has") from None
            first = entry.arrival if math.isnan(first) else first
            yield replace(entry, arrival=entry.arrival - first) if make is azure_line else entry


def rows_of(file: Path, lines: Iterable[str]) -> Iterator[tuple[int, Any, Any]]:
    """The number of each line, how it is read, and its fields."""
    if file.suffix == ".jsonl":
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield number, mooncake_line, parsed(file, number, text)
        return
    table = csv.DictReader(lines)
    names = {*(table.fieldnames or ())}
    if "TIMESTAMP" not in names and not names >= COMPACT:
        raise ValueError(
            f"{file}: columns {table.fieldnames} are not those of a trace: TIMESTAMP, ContextTokens, "
            "GeneratedTokens (Azure's), or arrival_ms, prompt, output"
        )
    make = azure_line if "TIMESTAMP" in names else compact_line
    for number, row in enumerate(table, 2):
        yield number, make, row


def parsed(file: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}, line {number}: {error} in what should be JSON") from None


def mooncake_line(row: Mapping[str, Any]) -> Entry:
    blocks = tuple(row.get("hash_ids") or ())
    return Entry(row["timestamp"] / 1e3, row["input_length"], row["output_length"], blocks)


def azure_line(row: Mapping[str, str]) -> Entry:
    at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
    return Entry(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def compact_line(row: Mapping[str, str]) -> Entry:
    blocks = tuple(name for part in (row.get("blocks") or "").split() for name in names_of(part))
    return Entry(int(row["arrival_ms"]) / 1e3, int(row["prompt"]), int(row["output"]), blocks)


def names_of(part: str) -> Iterable[int]:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def drawn(count: int, rate: float, prompt: float, output: float, seed: int = 0) -> Iterator[Entry]:
    """Requests that arrive independently, `rate` a second (a Poisson process), with lengths that are
    lognormal around these means, as conversations' are; all at once where the rate is infinite."""
    random, at = Random(seed), 0.0
    for _ in range(count):
        yield Entry(at, length(random, prompt), length(random, output))
        at += random.expovariate(rate) if math.isfinite(rate) else 0.0


def length(random: Random, mean: float, spread: float = 0.8) -> int:
    return max(1, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def faster(entries: Iterable[Entry], times: float) -> Iterator[Entry]:
    """The same requests, so many times as often."""
    return (replace(entry, arrival=entry.arrival / times) for entry in entries)


def share(entries: Iterable[Entry], replicas: int, which: int = 0) -> Iterator[Entry]:
    """What one of some replicas gets where requests are dealt in turn."""
    return islice(entries, which, None, replicas)
