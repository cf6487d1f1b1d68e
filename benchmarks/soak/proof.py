"""Proof of the audit logs by `duetto verify`, with each set of weights."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.answers import Answer
from benchmarks.soak.fleet import SERVICES
from benchmarks.soak.models import ADAPTERS, WEIGHTS
from duetto.serve.jobs.verify.claims import Claims

OTHER_WEIGHTS = re.compile(r"(\d+) of (\d+) tokens were made by other weights")
Verdicts = dict[int, dict[str, Any]]  # of requests that one set of weights does not prove, by their line


@dataclass
class Proof:
    """The verdicts on a log.

    requests: in the log; proved: of these, each token by the weights that made it
    altered: requests with other bits
    unproved: requests that no set of weights proves
    broken: lines at which the chain of hashes breaks
    cut_off: number of lines that a kill has cut off
    """

    requests: int = 0
    altered: list[Any] = field(default_factory=list)
    unproved: list[Any] = field(default_factory=list)
    broken: list[Any] = field(default_factory=list)
    cut_off: int = 0

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> "Proof":
        """Join the records that `duetto verify --json` has printed for a log, one for each set of weights."""
        found, others = cls(), list[Verdicts]()
        for record in records:
            found.requests, found.cut_off = record["requests"], len(record["cut_off"])
            found.altered += record["altered"]
            found.broken = record["broken"]
            others.append({one["line"]: one for one in record["not_provable"]})
        found.unproved = list(unproved(others))
        return found

    @property
    def proved(self) -> int:
        return self.requests - len(self.altered) - len(self.unproved)

    @property
    def failure(self) -> str:
        """Return why the log is not proved; "" if it is."""
        found = [*self.broken, *self.altered, *self.unproved]
        return str(found[0]) if found else "" if self.proved else "it has no request"


def unproved(others: Sequence[Verdicts]) -> Iterable[dict[str, Any]]:
    """Yield the requests of which a token is proved by no set of weights."""
    for line in sorted({line for verdicts in others for line in verdicts}):
        found = [verdicts[line] for verdicts in others if line in verdicts]
        if not all(is_of_other_weights(one) for one in found):
            yield from found[:1]
        elif len(found) == len(others) and not is_covered([one["reasons"][0] for one in found]):
            yield found[0]


def is_of_other_weights(verdict: dict[str, Any]) -> bool:
    return bool(verdict["reasons"]) and all(map(OTHER_WEIGHTS.search, verdict["reasons"]))


def is_covered(reasons: Sequence[str]) -> bool:
    """Return whether each token of a request was made by one set of weights, which has proved it. `reasons`:
    of each set, the number of tokens that others have made."""
    found = [one for one in map(OTHER_WEIGHTS.search, reasons) if one]
    total = int(found[0][2])
    return sum(total - int(one[1]) for one in found) == total


def prove(folder: Path) -> dict[str, Proof]:
    """Verify each audit log of a run's folder."""
    logs = sorted((folder / "audit").iterdir())
    return {log.name: Proof.of([verified(folder, log, name) for name in WEIGHTS]) for log in logs}


def verified(folder: Path, log: Path, weights: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "duetto", "verify", str(log), "--json", "--quiet"]
    command += ["--model", str(folder / "models" / weights)]
    if log.name in SERVICES["adapters"]:
        command += ["--lora-modules", *(f"{name}={folder / 'adapters' / name}" for name in ADAPTERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def missing(folder: Path, answers: Iterable[Answer]) -> int:
    """Return the number of answers with a choice whose tokens are in no log, as made by several sets of
    weights."""
    logs = (folder / "audit").iterdir()
    entries = [claim.entry for log in logs for claim in Claims.from_log(log).requests]
    made = [entry.tokens for entry in entries if len(entry.weights) > 1]

    def is_logged(tokens: list[int]) -> bool:
        return any(tokens == one[: len(tokens)] for one in made)

    return sum(not all(is_logged(choice.tokens) for choice in one.choices.values()) for one in answers)
