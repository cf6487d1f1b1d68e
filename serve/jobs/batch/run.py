"""The batch command: JSON lines in, JSON lines out.

Answers go through a journal (see `journal`), so that the same command resumes a killed one, and the finished
file is byte for byte that of a run without interruption.
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
from .job import BatchEngine, BatchJob, BatchOptions, OrderedStream, Sink
from .journal import Header, Journal, differing
from .lines import INTERNAL
from .source import JobInput, file_hash

Report = dict[str, Any]
# A job's options that decide its answers.
GRAMMARS = "llguidance"  # decides the answers of constrained lines alone
DECIDING = "seed", "model_name", "max_line_bytes", "tool_call_parser"


def run_batch(
    start_engine: Callable[[], BatchEngine],
    input: str,
    output: str,
    options: BatchOptions,
    fingerprint: Mapping[str, str],
    summary: Callable[[Report], None] | None = None,
    summary_file: str | None = None,
) -> int:
    """Answer every line of `input` in `output`; `-` is standard input and output.

    `fingerprint` is all that decides the answers besides the input and `options`: the model, the device, the
    libraries' versions, the engine's flags. A journal or an output with another one is refused. The engine is
    started when a line needs it; `summary` gets its report at the end, and writes it to `summary_file`, if
    that is given.

    Returns the process's exit code: 0 is success (a wrong line has an error as its answer), 1 a refusal or a
    failure that standard error explains, 130 (Ctrl-C) and 143 (SIGTERM) a job that the same command resumes.
    Raises BrokenPipeError if standard output has lost its reader.
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
            if not (source.has_grammars or options.sampling.get("structured_outputs")):
                known.pop(GRAMMARS, None)  # installing it changes no answer
            return call.to_file(place, known)
    except JobError as error:
        say(str(error), error.hint)
        return 1
    except Interrupted as interrupted:
        say("interrupted", interrupted.hint)
        return interrupted.code


@dataclass(frozen=True)
class JobFiles:
    """The files of a job: the output, and those in its folder that belong to it."""

    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_name(self.output.name + ".journal")

    @property
    def report(self) -> Path:
        return self.output.with_name(self.output.name + ".report.json")

    def partial(self, token: str) -> Path:
        """Return the file that a job with this token writes before it takes its final name."""
        return self.output.with_name(f".duetto-{token}.partial")


@dataclass(frozen=True)
class BatchRun:
    """A call of the command with an open input."""

    start_engine: Callable[[], BatchEngine]
    source: JobInput
    options: BatchOptions
    interrupts: Interrupts
    summary: Callable[[Report], None] | None

    def to_stdout(self) -> int:
        """Write the answers in order as they come; an interrupted run leaves nothing to resume."""
        if sys.stdout is None:
            raise JobError("standard output is closed")
        with disk("standard output"):
            onto_input = self.source.is_file(os.fstat(1))
        if onto_input:
            raise JobError("standard output is the input: answers would be read as lines")
        sys.stdout.flush()
        self._run(OrderedStream(1), datetime.now())
        return 0

    def to_file(self, place: JobFiles, fingerprint: dict[str, str]) -> int:
        """Resume or begin a job, and make the finished file from its journal. Raises JobError or
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
        """Raise JobError, and remove an empty journal, if another file has the output's name."""
        reason = obstacle(place, fingerprint) or foreign(place.report)
        if reason and not journal.count and not journal.damaged:
            journal.remove()
        refuse(reason)

    def _answer(self, journal: Journal) -> Report | None:
        if journal.count:
            say(f"{journal.count} of {self.source.count} lines are answered already")
        return self._run(journal, datetime.fromisoformat(journal.header.started))

    def _run(self, sink: Sink, now: datetime) -> Report | None:
        job = BatchJob(self.start_engine, self.source, sink, self.options, self.interrupts, now)
        job.run()
        if job.engine_report is not None and self.summary is not None:
            self.summary(job.engine_report)
        return job.engine_report

    def _finish(self, place: JobFiles, journal: Journal, ran: Report | None) -> None:
        """Write the output, then the report with its hash, then remove the journal: the next run completes
        what a kill leaves."""
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
            check=lambda _: refuse(foreign(place.report)),
            like=status(place.report) or like,
        )
        with disk(place.journal):
            journal.remove()
        say(f"{count} lines are answered in {place.output}{result.remark}")


class Result:
    """A finished output's hash, its number of lines, and their errors by code."""

    def __init__(self):
        self._sha256 = hashlib.sha256()
        self._count = 0
        self._errors = Counter[str]()

    def lines(self, answers: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
        """Yield the output's lines, and count them."""
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
        """The end of the final message: the number of errors, if there are any."""
        wrong, internal = self._errors.total(), self._errors[INTERNAL]
        text = f", {wrong} of them with an error" if wrong else ""
        return text + (f" ({internal} internal: the report says where)" if internal else "")


def refuse(reason: str) -> None:
    if reason:
        raise JobError(reason)


def finished(place: JobFiles, fingerprint: Mapping[str, str]) -> bool:
    """Return whether the output is this job's, complete and unchanged."""
    with disk(place.output):
        report = read_report(place.report)
        return bool(
            report
            and report["fingerprint"] == fingerprint
            and place.output.is_file()
            and report["output"]["sha256"] == file_hash(place.output)
        )


def obstacle(place: JobFiles, fingerprint: Mapping[str, str]) -> str:
    """Return why the output cannot be written: a file there would be lost. "" if there is none, or an empty
    one."""
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
    """Return why a report cannot be written: another file has its name. "" if none has, or a report of this
    command."""
    with disk(report):
        if not os.path.lexists(report) or (not report.is_symlink() and read_report(report) is not None):
            return ""
    return f"{report} exists and is not a report of this command; remove it, or choose another output"


def check_distinct(source: JobInput, place: JobFiles, summary_file: str | None) -> None:
    """Raise JobError if two of the input, the output and its files are one, by whatever names."""
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
    """Raise JobError if a file at the output's place has content that is not the same."""
    if output.exists() and output.stat().st_size and not filecmp.cmp(output, partial, shallow=False):
        raise JobError(f"{output} appeared or was changed while the job ran; move it away")


def check_defaults(sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams.from_dict(sampling)
    except (TypeError, ValueError) as error:
        raise JobError(str(error)) from None


def own_fingerprint(options: BatchOptions) -> dict[str, str]:
    """Return the options that decide answers, and this program's version."""
    return {
        "duetto": version("duetto"),
        "sampling": msgspec.json.encode(dict(options.sampling), order="sorted").decode(),
        **{name: str(vars(options)[name]) for name in DECIDING},
    }


def read_report(path: Path) -> Report | None:
    """Return a finished job's report; None if there is none, or another file has its name."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        msgspec.convert(found, ReportHead)
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    return found


class ReportHead(msgspec.Struct):
    """Fields that every report of this command has, and hardly another file."""

    fingerprint: dict[str, str]
    started: str
    output: dict[str, str | int]
    requests: list[dict[str, Any]]

    def __post_init__(self):
        if type(self.output.get("sha256")) is not str:
            raise ValueError("a report without its output's hash")


def report_pieces(report: Report, requests: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the report as JSON, with an entry for each line, without having all of them in memory."""
    yield msgspec.json.encode(report)[:-1] + b',"requests":['
    for i, about in enumerate(requests):
        known = {k: v for k, v in about.items() if k not in ("index", "digest")}
        yield (b",\n" if i else b"\n") + msgspec.json.encode(known)
    yield b"\n]}\n"


def say(text: str, hint: str = "") -> None:
    """Write a message of the command to standard error."""
    tell("\n".join(["duetto batch: " + text, *([hint] if hint else [])]))
