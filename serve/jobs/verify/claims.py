"""Claims of an audit log: each request's tokens and scores, and the facts that decide them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...llm.audit.chain import START_KIND, ChainLine, verify_chain_lines
from ...llm.audit.facts import REPLAY_OPTIONS
from ...options.keywords import FORMER_NAMES
from ...text.outputs import CUT_REASONS


class AdapterName(msgspec.Struct, frozen=True):
    """An adapter's name, and the hash of its weights."""

    name: str
    digest: str


class AuditEntry(msgspec.Struct, frozen=True):
    """A request's line; `audit.entry.request_entry` describes its fields."""

    id: str
    index: int
    prompt: list[int]
    tokens: list[int]
    known: int
    params: dict[str, Any]
    seed: int
    end: int
    stop_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    score_from: int
    weights: list[tuple[int, int]]
    finish_reason: str
    stop_reason: int | str | None
    scores: dict[str, list[Any]] | None
    prompt_scores: dict[str, list[Any]] | None
    adapter: AdapterName | None = None

    def find_contradictions(self) -> Iterator[str]:
        """Yield the contradictions in this line: no engine of any model can have written it."""
        if not 0 < len(self.prompt) < self.end or not 0 <= self.score_from <= len(self.prompt):
            yield f"lengths: {len(self.prompt)} prompt tokens of {self.end}, scored from {self.score_from} on"
        if not 0 <= self.known <= len(self.tokens) <= self.end - len(self.prompt):
            yield f"lengths: {len(self.tokens)} tokens after {len(self.prompt)} of {self.end}"
        if not self.tokens and self.finish_reason not in CUT_REASONS:
            yield f"no tokens before {self.finish_reason!r}"
        if not 0 <= self.seed < 1 << 32:
            yield f"seed {self.seed}, which is not of 32 bits"
        starts = [first for first, _ in self.weights]
        is_ascending = starts == sorted(set(starts)) and max(starts, default=0) <= len(self.tokens)
        if not is_ascending or (starts[:1] != [self.known] and self.known < len(self.tokens)):
            yield f"weights from tokens {starts} on, of tokens {self.known} to {len(self.tokens)}"


class Start(msgspec.Struct):
    """The line of a process's start. `versions` are the hashes of its weights, by number of the update."""

    model: str | None
    options: dict[str, Any]
    facts: dict[str, str]
    tokenizer: str | None
    outside_contract: list[str]
    weights: str | None
    versions: dict[int, str | None] = {}

    def __post_init__(self):
        self.versions = {0: self.weights}
        self.options = {FORMER_NAMES.get(name, name): value for name, value in self.options.items()}
        if others := sorted(self.options.keys() - set(REPLAY_OPTIONS)):
            raise ValueError(f"options: {others[0]!r} is not allowed, a log has {', '.join(REPLAY_OPTIONS)}")


class Span(NamedTuple):
    """Generated tokens [first, end) of a request, made by one version of the weights."""

    first: int
    end: int
    version: int


@dataclass(frozen=True)
class Claim:
    """A request's line in a log.

    line: its number, from 1
    entry: its content
    start: the start that it refers to; None if the log does not have it
    """

    line: int
    entry: AuditEntry
    start: Start | None

    @property
    def spans(self) -> list[Span]:
        """Spans of generated tokens, one for each version of the weights. Tokens that came with the request
        are in none."""
        versions, count = self.entry.weights, len(self.entry.tokens)
        ends = [*(first for first, _ in versions[1:]), count]
        return [Span(a, end, version) for (a, version), end in zip(versions, ends, strict=False) if a < end]


@dataclass
class Claims:
    """All claims of a log."""

    requests: list[Claim] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)  # errors by line number
    cut_off: list[int] = field(default_factory=list)  # numbers of incomplete lines, left by killed processes
    starts: dict[str, Start] = field(default_factory=dict)  # by hash
    hashes: set[str] = field(default_factory=set)  # of all lines
    head: str = ""  # hash of the last line

    @classmethod
    def from_log(cls, path: Path) -> "Claims":
        """Read all claims of a log. Raises OSError, and ValueError for a file that is no audit log."""
        claims = cls()
        for line in verify_chain_lines(path):
            claims._add_line(line)
        if not claims.starts and not claims.requests and not claims.broken:
            raise ValueError(f"{path} is no audit log: it has no start of an engine")
        return claims

    def _add_line(self, line: ChainLine) -> None:
        if not line.record:
            self.cut_off.append(line.number)
            return
        self.head = line.hash
        self.hashes.add(line.hash)
        if line.error:
            self.broken[line.number] = line.error
        try:
            self._add_record(line)
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            self.broken.setdefault(line.number, f"it is no line of a log: {error}")

    def _add_record(self, line: ChainLine) -> None:
        record: Mapping[str, Any] = line.record
        if record["kind"] == START_KIND:
            self.starts[line.hash] = msgspec.convert(record, Start)
        elif record["kind"] == "weights":
            self.starts[record["start"]].versions[record["version"]] = record["weights"]
        elif record["kind"] == "request":
            entry = msgspec.convert(record, AuditEntry)
            self.requests.append(Claim(line.number, entry, self.starts.get(record["start"])))
        else:
            raise KeyError(f"kind {record['kind']!r}")

    @property
    def last_start(self) -> Start | None:
        """Latest start in the log, with the options for an engine that verifies it; None without one."""
        return next(reversed(self.starts.values()), None)
