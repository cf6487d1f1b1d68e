"""The batch command: JSON lines in, JSON lines out, and no finished work is ever lost.

Answers go through a journal (see `journal`), so that the same command goes on where a killed one stopped, and the finished
file is the same, byte for byte, as that of a run without interruption.
"""

import filecmp
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ..sampling.params import SamplingParams
from .interrupt import Interrupted, Interrupts
from .job import BatchEngine, BatchOptions, Job, OrderedStream
from .journal import Header, JobError, Journal, differing, disk, write_whole
from .source import Source, hash_of

Report = dict[str, Any]


def run_batch(
    start_engine: Callable[[], BatchEngine],
    input: str,
    output: str,
    options: BatchOptions,
    fingerprint: Mapping[str, str],
    summary: Callable[[Report], None] | None = None,
) -> int:
    """Answers every line of `input` in `output`; `-` is standard input and output. Returns the process's exit code.

    `fingerprint` says what decides the answers beside the input and `options`: the model, the device, the libraries'
    versions, the engine's flags. A journal or an output with another one is refused. The engine is started when a line needs
    it; `summary` is given its report at the end.

    0 is success (a line that is wrong has an answer that says so), 1 a refusal or a failure that standard error explains,
    130 (Ctrl-C) and 143 (SIGTERM) a job that the same command resumes.
    """
    try:
        check_defaults(options.sampling)
        with Interrupts() as interrupts, Source.open(input, options.max_line_bytes) as source:
            call = Call(start_engine, source, options, interrupts, summary)
            if output == "-":
                return call.to_stdout()
            known = {"input": source.sha256, **own_fingerprint(options), **fingerprint}
            return call.to_file(Place(Path(os.path.realpath(output))), known)
    except JobError as error:
        say(str(error), error.hint)
        return 1
    except Interrupted as interrupted:
        say("interrupted", interrupted.hint)
        return interrupted.code


@dataclass(frozen=True)
class Place:
    """The files of a job: the output, and what stands beside it."""

    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_name(self.output.name + ".journal")

    @property
    def report(self) -> Path:
        return self.output.with_name(self.output.name + ".report.json")


@dataclass(frozen=True)
class Call:
    """One call of the command, with its input at hand."""

    start_engine: Callable[[], BatchEngine]
    source: Source
    options: BatchOptions
    interrupts: Interrupts
    summary: Callable[[Report], None] | None

    def to_stdout(self) -> int:
        """Answers in order as they come; nothing is kept of an interrupted run."""
        sys.stdout.flush()
        job = Job(
            self.start_engine, self.source, OrderedStream(1), self.options, self.interrupts, datetime.now()
        )
        self._run(job)
        return 0

    def to_file(self, place: Place, fingerprint: dict[str, str]) -> int:
        """Resumes or begins a job, and makes the finished file of its journal. Raises JobError or Interrupted."""
        if finished(place, fingerprint) and not place.journal.exists():
            return self._nothing_to_do(place)
        check_folder(place)
        header = Header(fingerprint, datetime.now().isoformat(timespec="seconds"))
        with Journal(place.journal, header) as journal:
            if finished(place, fingerprint):
                journal.remove()
                return self._nothing_to_do(place)
            if journal.count < self.source.count or not journal.count:
                self._check_free(place, journal, fingerprint)
            try:
                self._finish(place, journal, self._answer(journal))
            except (JobError, Interrupted) as error:
                kept = (
                    f"{journal.count} of {self.source.count} lines are answered and kept in {place.journal}"
                )
                error.hint = f"{kept}; run the same command again to go on"
                raise
        return 0

    def _nothing_to_do(self, place: Place) -> int:
        say(f"{place.output} is already complete: same input, model and flags")
        return 0

    def _check_free(self, place: Place, journal: Journal, fingerprint: dict[str, str]) -> None:
        """Raises JobError, leaving no empty journal behind, if something stands where the output is to be."""
        reason = obstacle(place, fingerprint)
        if reason and not journal.count:
            journal.remove()
        if reason:
            raise JobError(reason)

    def _answer(self, journal: Journal) -> Report | None:
        if journal.count:
            say(f"{journal.count} of {self.source.count} lines are answered already")
        now = datetime.fromisoformat(journal.header.started)
        return self._run(Job(self.start_engine, self.source, journal, self.options, self.interrupts, now))

    def _run(self, job: Job) -> Report | None:
        job.run()
        if job.engine_report is not None and self.summary is not None:
            self.summary(job.engine_report)
        return job.engine_report

    def _finish(self, place: Place, journal: Journal, ran: Report | None) -> None:
        """First the output, then the report that vouches for it, then away with the journal: any kill between is repaired."""
        count, sha256 = self.source.count, hashlib.sha256()

        def lines() -> Iterator[bytes]:
            for _, answer in journal.answers(count):
                sha256.update(answer + b"\n")
                yield answer + b"\n"

        write_whole(place.output, lines(), check=lambda partial: check_replaceable(place.output, partial))
        errors = sum("error" in about for about, _ in journal.answers(count))
        report = {
            "fingerprint": journal.header.fingerprint,
            "started": journal.header.started,
            "output": {"sha256": sha256.hexdigest(), "lines": count, "errors": errors},
            "run": ran,
        }
        write_whole(place.report, report_pieces(report, (about for about, _ in journal.answers(count))))
        with disk(place.journal):
            journal.remove()
        say(
            f"{count} lines are answered in {place.output}"
            + (f", {errors} of them with an error" if errors else "")
        )


def finished(place: Place, fingerprint: Mapping[str, str]) -> bool:
    """Whether the output is this very job's, complete and unchanged."""
    with disk(place.output):
        report = read_report(place.report)
        return bool(
            report
            and report["fingerprint"] == fingerprint
            and place.output.is_file()
            and report["output"]["sha256"] == hash_of(place.output)
        )


def obstacle(place: Place, fingerprint: Mapping[str, str]) -> str:
    """Why the output cannot be written: something is there that would be lost. Empty if nothing is (or an empty file)."""
    output = place.output
    with disk(output):
        if not output.exists() or (output.is_file() and not output.stat().st_size):
            return ""
        report = read_report(place.report)
        if report is None or not output.is_file():
            return f"{output} exists and is not a result of this command; remove it or choose another output"
        differences = differing(report["fingerprint"], fingerprint)
        if differences:
            return (
                f"{output} is the result of another job:\n{differences}\nremove it or choose another output"
            )
        return f"{output} was changed since it was finished; remove it or choose another output"


def check_folder(place: Place) -> None:
    if not place.output.parent.is_dir():
        raise JobError(f"{place.output.parent} is not a folder")
    if place.output.exists() and not place.output.is_file():
        raise JobError(f"{place.output} is not a file that could be replaced; use - to write to a stream")


def check_replaceable(output: Path, partial: Path) -> None:
    """What stands at the output's place may be replaced if nothing is lost: it is empty, or the same already."""
    if output.exists() and output.stat().st_size and not filecmp.cmp(output, partial, shallow=False):
        raise JobError(f"{output} appeared or was changed while the job ran; move it away")


def check_defaults(sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams.from_dict(sampling)
    except (TypeError, ValueError) as error:
        raise JobError(str(error)) from None


def own_fingerprint(options: BatchOptions) -> dict[str, str]:
    """What decides answers among the options, and this program's version."""
    return {
        "duetto": version("duetto"),
        "seed": str(options.seed),
        "sampling": msgspec.json.encode(dict(options.sampling), order="sorted").decode(),
        "model_name": options.model_name,
        "max_line_bytes": str(options.max_line_bytes),
    }


def read_report(path: Path) -> Report | None:
    """A finished job's report; None if there is none, or something else has its name."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    whole = isinstance(found.get("fingerprint"), dict) and isinstance(found.get("output"), dict)
    return found if whole and "sha256" in found["output"] else None


def report_pieces(report: Report, requests: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """The report as JSON, with an entry for each line, never all of them in memory."""
    yield msgspec.json.encode(report)[:-1] + b',"requests":['
    for i, about in enumerate(requests):
        known = {k: v for k, v in about.items() if k not in ("index", "digest")}
        yield (b",\n" if i else b"\n") + msgspec.json.encode(known)
    yield b"\n]}\n"


def say(text: str, hint: str = "") -> None:
    """Tells the user on standard error."""
    print("\n".join(["duetto batch: " + text, *([hint] if hint else [])]), file=sys.stderr, flush=True)
