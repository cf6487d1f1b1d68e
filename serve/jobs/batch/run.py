"""The batch command: JSON lines in, JSON lines out, and no finished work is ever lost.

Answers go through a journal (see `journal`), so that the same command goes on where a killed one stopped, and
the finished file is the same, byte for byte, as that of a run without interruption.
"""

import filecmp
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ....sampling.params import SamplingParams
from ...host.files import PRIVATE, JobError, disk, status, write_whole
from ...host.signals import Interrupted, Interrupts
from ...host.streams import tell
from .job import BatchEngine, BatchJob, OrderedStream
from .journal import Header, Journal, differing
from .lines import INTERNAL
from .options import BatchOptions
from .source import JobInput, file_hash

Report = dict[str, Any]
DECIDING = "seed", "model_name", "max_line_bytes", "tool_call_parser"  # answers, of a job's options


def run_batch(
    start_engine: Callable[[], BatchEngine],
    input: str,
    output: str,
    options: BatchOptions,
    fingerprint: Mapping[str, str],
    summary: Callable[[Report], None] | None = None,
    summary_file: str | None = None,
) -> int:
    """Answers every line of `input` in `output`; `-` is standard input and output. Returns the process's exit
    code.

    `fingerprint` says what decides the answers beside the input and `options`: the model, the device, the
    libraries' versions, the engine's flags. A journal or an output with another one is refused. The engine is
    started when a line needs it; `summary` is given its report at the end, and writes it to `summary_file`,
    if anywhere.

    0 is success (a line that is wrong has an answer that says so), 1 a refusal or a failure that standard
    error explains, 130 (Ctrl-C) and 143 (SIGTERM) a job that the same command resumes. Raises BrokenPipeError
    where standard output has lost its reader.
    """
    try:
        check_defaults(options.sampling)
        with Interrupts() as interrupts, JobInput.open(input, options.max_line_bytes) as source:
            call = BatchRun(start_engine, source, options, interrupts, summary)
            if output == "-":
                return call.to_stdout()
            place = JobFiles(Path(os.path.realpath(output)))
            check_distinct(source, place, summary_file)
            known = {"input": source.sha256, **own_fingerprint(options), **fingerprint}
            return call.to_file(place, known)
    except JobError as error:
        say(str(error), error.hint)
        return 1
    except Interrupted as interrupted:
        say("interrupted", interrupted.hint)
        return interrupted.code


@dataclass(frozen=True)
class JobFiles:
    """The files of a job: the output, and what stands beside it."""

    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_name(self.output.name + ".journal")

    @property
    def report(self) -> Path:
        return self.output.with_name(self.output.name + ".report.json")

    def partial(self, token: str) -> Path:
        """Where a job with this token writes what is to appear complete; nobody else has the name."""
        return self.output.with_name(f".duetto-{token}.partial")


@dataclass(frozen=True)
class BatchRun:
    """One call of the command, with its input at hand."""

    start_engine: Callable[[], BatchEngine]
    source: JobInput
    options: BatchOptions
    interrupts: Interrupts
    summary: Callable[[Report], None] | None

    def to_stdout(self) -> int:
        """Answers in order as they come; nothing is kept of an interrupted run."""
        if sys.stdout is None:
            raise JobError("standard output is closed")
        with disk("standard output"):
            onto_input = self.source.is_file(os.fstat(1))
        if onto_input:
            raise JobError("standard output is the input: answers would be read as lines")
        sys.stdout.flush()
        job = BatchJob(
            self.start_engine, self.source, OrderedStream(1), self.options, self.interrupts, datetime.now()
        )
        self._run(job)
        return 0

    def to_file(self, place: JobFiles, fingerprint: dict[str, str]) -> int:
        """Resumes or begins a job, and makes the finished file of its journal. Raises JobError or
        Interrupted."""
        if finished(place, fingerprint) and not place.journal.exists():
            return self._nothing_to_do(place)
        check_folder(place)
        header = Header(fingerprint, datetime.now().isoformat(timespec="seconds"))
        found = status(place.output)
        mode = PRIVATE if found is None else found.st_mode & 0o666
        with Journal(place.journal, header, self.source.count, mode) as journal:
            if journal.damaged:
                records = f"{journal.damaged} damaged record" + "s" * (journal.damaged > 1)
                say(f"{records} in {place.journal} skipped; what was lost with them is answered again")
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

    def _nothing_to_do(self, place: JobFiles) -> int:
        say(f"{place.output} is already complete: same input, model and flags")
        return 0

    def _check_free(self, place: JobFiles, journal: Journal, fingerprint: dict[str, str]) -> None:
        """Raises JobError, leaving no empty journal behind, if something stands where the output is to be."""
        reason = obstacle(place, fingerprint) or foreign(place.report)
        if reason and not journal.count and not journal.damaged:
            journal.remove()
        if reason:
            raise JobError(reason)

    def _answer(self, journal: Journal) -> Report | None:
        if journal.count:
            say(f"{journal.count} of {self.source.count} lines are answered already")
        now = datetime.fromisoformat(journal.header.started)
        return self._run(
            BatchJob(self.start_engine, self.source, journal, self.options, self.interrupts, now)
        )

    def _run(self, job: BatchJob) -> Report | None:
        job.run()
        if job.engine_report is not None and self.summary is not None:
            self.summary(job.engine_report)
        return job.engine_report

    def _finish(self, place: JobFiles, journal: Journal, ran: Report | None) -> None:
        """First the output, then the report that vouches for it, then away with the journal: any kill between
        is repaired."""
        count, result = self.source.count, Result()
        partial, like = place.partial(journal.header.token), status(place.output)
        write_whole(
            place.output,
            result.lines(journal.answers(count)),
            partial,
            check=lambda partial: check_replaceable(place.output, partial),
            like=like,
        )
        about = {
            "fingerprint": journal.header.fingerprint,
            "started": journal.header.started,
            "output": result.as_report(),
            "run": ran,
        }
        write_whole(
            place.report,
            report_pieces(about, (about for about, _ in journal.answers(count))),
            partial,
            check=lambda _: check_ours(place.report),
            like=status(place.report) or like,
        )
        with disk(place.journal):
            journal.remove()
        say(f"{count} lines are answered in {place.output}{result.remark}")


class Result:
    """What is told of a finished output: its hash, its lines, and the errors among them by code."""

    def __init__(self):
        self._sha256 = hashlib.sha256()
        self._count = 0
        self._errors = Counter[str]()

    def lines(self, answers: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
        """The output's lines, which are counted on the way."""
        for about, answer in answers:
            line = answer + b"\n"
            self._sha256.update(line)
            self._count += 1
            self._errors.update([str(about["error"])] if "error" in about else [])
            yield line

    def as_report(self) -> Report:
        errors = {"errors": self._errors.total(), "internal_errors": self._errors[INTERNAL]}
        return {"sha256": self._sha256.hexdigest(), "lines": self._count, **errors}

    @property
    def remark(self) -> str:
        """The end of a sentence."""
        wrong, internal = self._errors.total(), self._errors[INTERNAL]
        said = f", {wrong} of them with an error" if wrong else ""
        return said + (f" ({internal} internal: the report says where)" if internal else "")


def finished(place: JobFiles, fingerprint: Mapping[str, str]) -> bool:
    """Whether the output is this very job's, complete and unchanged."""
    with disk(place.output):
        report = read_report(place.report)
        return bool(
            report
            and report["fingerprint"] == fingerprint
            and place.output.is_file()
            and report["output"]["sha256"] == file_hash(place.output)
        )


def obstacle(place: JobFiles, fingerprint: Mapping[str, str]) -> str:
    """Why the output cannot be written: something is there that would be lost. Empty if nothing is (or an
    empty file)."""
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


def foreign(report: Path) -> str:
    """Why a report cannot be written: something else has its name. Empty if nothing has, or a report of this
    command."""
    with disk(report):
        if not os.path.lexists(report) or (not report.is_symlink() and read_report(report) is not None):
            return ""
    return f"{report} exists and is not a report of this command; remove it, or choose another output"


def check_ours(report: Path) -> None:
    if reason := foreign(report):
        raise JobError(reason)


def check_distinct(source: JobInput, place: JobFiles, summary_file: str | None) -> None:
    """No file is written that is read, and none twice, by whatever name. Raises JobError."""
    named = {"the output": place.output, "the job's journal": place.journal, "the job's report": place.report}
    summary = None if summary_file is None else Path(os.path.realpath(summary_file))
    for what, path in {**named, "--report": summary}.items():
        found = None if path is None else status(path)
        if found is not None and source.is_file(found):
            raise JobError(f"{path} is the input and {what}: they must be two files")
    for what, path in named.items():
        if summary == Path(os.path.realpath(path)):
            raise JobError(f"{path} is --report and {what}: they must be two files")


def check_folder(place: JobFiles) -> None:
    if not place.output.parent.is_dir():
        raise JobError(f"{place.output.parent} is not a folder")
    if place.output.exists() and not place.output.is_file():
        raise JobError(f"{place.output} is not a file that could be replaced; use - to write to a stream")


def check_replaceable(output: Path, partial: Path) -> None:
    """What stands at the output's place may be replaced if nothing is lost: it is empty, or the same
    already."""
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
        "sampling": msgspec.json.encode(dict(options.sampling), order="sorted").decode(),
        **{name: str(vars(options)[name]) for name in DECIDING},
    }


def read_report(path: Path) -> Report | None:
    """A finished job's report; None if there is none, or something else has its name."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        msgspec.convert(found, ReportHead)
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    return found


class ReportHead(msgspec.Struct):
    """What every report of this command has, and hardly another file."""

    fingerprint: dict[str, str]
    started: str
    output: dict[str, str | int]
    requests: list[dict[str, Any]]

    def __post_init__(self):
        if type(self.output.get("sha256")) is not str:
            raise ValueError("a report without its output's hash")


def report_pieces(report: Report, requests: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """The report as JSON, with an entry for each line, never all of them in memory."""
    yield msgspec.json.encode(report)[:-1] + b',"requests":['
    for i, about in enumerate(requests):
        known = {k: v for k, v in about.items() if k not in ("index", "digest")}
        yield (b",\n" if i else b"\n") + msgspec.json.encode(known)
    yield b"\n]}\n"


def say(text: str, hint: str = "") -> None:
    """Tells the user on standard error."""
    tell("\n".join(["duetto batch: " + text, *([hint] if hint else [])]))
