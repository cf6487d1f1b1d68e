"""The batch command: JSON lines in, JSON lines out.

Answers go through a journal (see `journal`), so that the same command resumes a killed one. The finished file
has the same bytes as after a run without interruption.
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
from ...host.files import PRIVATE_MODE, JobError, file_status, wrap_os_errors, write_atomically
from ...host.signals import Interrupted, Interrupts
from ...host.streams import print_stderr
from .fingerprint import fingerprint_differences
from .job import AnswerSink, BatchEngine, BatchJob, BatchOptions, OrderedStream
from .job_input import JobInput, hash_file
from .journal import Header, Journal
from .lines import INTERNAL_ERROR

Report = dict[str, Any]
# Options of a job that decide its answers, and the package that decides only answers of constrained lines.
GRAMMAR_LIBRARY = "llguidance"
DECIDING_OPTIONS = "seed", "model_name", "max_line_bytes", "tool_call_parser"


def run_batch(
    start_engine: Callable[[], BatchEngine],
    input: str,
    output: str,
    options: BatchOptions,
    fingerprint: Mapping[str, str],
    on_report: Callable[[Report], None] | None = None,
    report_file: str | None = None,
) -> int:
    """Answer every line of `input` in `output`; `-` is standard input and output.

    start_engine: called when the first line needs the engine
    fingerprint: facts that decide the answers besides the input and `options`, such as model, device and
        engine flags; a journal or an output with another fingerprint is refused
    on_report: called at the end with the engine's report
    report_file: file that `on_report` writes, if any; it must not be one of the job's files

    Returns the process's exit code: 0 is success (a wrong line has an error as its answer), 1 a refusal or a
    failure that standard error explains, 130 (Ctrl-C) and 143 (SIGTERM) a job that the same command resumes.
    Raises BrokenPipeError if standard output has lost its reader.
    """
    try:
        check_sampling_defaults(options.sampling)
        with Interrupts() as interrupts, JobInput.open(input, options.max_line_bytes) as job_input:
            batch_run = BatchRun(start_engine, job_input, options, interrupts, on_report)
            if output == "-":
                return batch_run.run_to_stdout()
            files = JobFiles(Path(os.path.realpath(output)))
            check_distinct_files(job_input, files, report_file)
            full_fingerprint = {"input": job_input.sha256, **options_fingerprint(options), **fingerprint}
            if not (job_input.has_grammars or options.sampling.get("structured_outputs")):
                full_fingerprint.pop(GRAMMAR_LIBRARY, None)  # installing it changes no answer
            return batch_run.run_to_file(files, full_fingerprint)
    except JobError as error:
        print_batch_message(str(error), error.hint)
        return 1
    except Interrupted as interrupted:
        print_batch_message("interrupted", interrupted.hint)
        return interrupted.code


@dataclass(frozen=True)
class JobFiles:
    """The files of a job, all in the output's folder: output, journal, report, and a partial output."""

    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_name(self.output.name + ".journal")

    @property
    def report(self) -> Path:
        return self.output.with_name(self.output.name + ".report.json")

    def partial(self, token: str) -> Path:
        """Return the file that a job writes before it gets its final name. `token` is the journal's."""
        return self.output.with_name(f".duetto-{token}.partial")


@dataclass(frozen=True)
class BatchRun:
    """A run of the command, with an open input. `on_report` is called with the engine's report at the end."""

    start_engine: Callable[[], BatchEngine]
    job_input: JobInput
    options: BatchOptions
    interrupts: Interrupts
    on_report: Callable[[Report], None] | None

    def run_to_stdout(self) -> int:
        """Write the answers to standard output, in the order of the lines. An interrupted run cannot be
        resumed."""
        if sys.stdout is None:
            raise JobError("standard output is closed")
        with wrap_os_errors("standard output"):
            is_input = self.job_input.is_same_file(os.fstat(1))
        if is_input:
            raise JobError("standard output is the input: answers would be read as lines")
        sys.stdout.flush()
        self._run_job(OrderedStream(1), datetime.now())
        return 0

    def run_to_file(self, files: JobFiles, fingerprint: dict[str, str]) -> int:
        """Resume or begin a job, and write the output from its journal. Raises JobError or Interrupted."""
        if is_job_complete(files, fingerprint) and not files.journal.exists():
            return self._report_complete(files)
        check_output_folder(files)
        header = Header(fingerprint, datetime.now().isoformat(timespec="seconds"))
        old_status = file_status(files.output)
        mode = PRIVATE_MODE if old_status is None else old_status.st_mode & 0o666
        with Journal(files.journal, header, self.job_input.num_lines, mode) as journal:
            if journal.num_damaged:
                records = f"{journal.num_damaged} damaged record" + "s" * (journal.num_damaged > 1)
                print_batch_message(
                    f"{records} in {files.journal} skipped; what was lost with them is answered again"
                )
            if is_job_complete(files, fingerprint):
                journal.remove()
                return self._report_complete(files)
            if journal.num_answered < self.job_input.num_lines or not journal.num_answered:
                self._require_free_names(files, journal, fingerprint)
            try:
                self._write_output_and_report(files, journal, self._answer_lines(journal))
            except (JobError, Interrupted) as error:
                answered = f"{journal.num_answered} of {self.job_input.num_lines} lines are answered"
                error.hint = f"{answered} and kept in {files.journal}; run the same command again to go on"
                raise
        return 0

    def _report_complete(self, files: JobFiles) -> int:
        print_batch_message(f"{files.output} is already complete: same input, model and flags")
        return 0

    def _require_free_names(self, files: JobFiles, journal: Journal, fingerprint: dict[str, str]) -> None:
        """Raise JobError if another file has the output's or the report's name. An empty journal is then
        removed."""
        reason = output_obstacle(files, fingerprint) or report_obstacle(files.report)
        if reason and not journal.num_answered and not journal.num_damaged:
            journal.remove()
        raise_if_refused(reason)

    def _answer_lines(self, journal: Journal) -> Report | None:
        if journal.num_answered:
            print_batch_message(
                f"{journal.num_answered} of {self.job_input.num_lines} lines are answered already"
            )
        return self._run_job(journal, datetime.fromisoformat(journal.header.started))

    def _run_job(self, sink: AnswerSink, now: datetime) -> Report | None:
        job = BatchJob(self.start_engine, self.job_input, sink, self.options, self.interrupts, now)
        job.run()
        if job.engine_report is not None and self.on_report is not None:
            self.on_report(job.engine_report)
        return job.engine_report

    def _write_output_and_report(
        self, files: JobFiles, journal: Journal, engine_report: Report | None
    ) -> None:
        """Write the output, then the report with its hash, then remove the journal. After a kill in between,
        the next run completes this."""
        count, result = self.job_input.num_lines, OutputSummary()
        partial, old_status = files.partial(journal.header.token), file_status(files.output)
        write_atomically(
            files.output,
            result.hash_lines(journal.read_answers(count)),
            partial,
            check=lambda partial: check_replaceable(files.output, partial),
            like=old_status,
        )
        about = {
            "fingerprint": journal.header.fingerprint,
            "started": journal.header.started,
            "output": result.to_report(),
            "run": engine_report,
        }
        write_atomically(
            files.report,
            encode_report_pieces(about, (about for about, _ in journal.read_answers(count))),
            partial,
            check=lambda _: raise_if_refused(report_obstacle(files.report)),
            like=file_status(files.report) or old_status,
        )
        with wrap_os_errors(files.journal):
            journal.remove()
        print_batch_message(f"{count} lines are answered in {files.output}{result.error_summary}")


class OutputSummary:
    """Summary of a finished output: its hash, its number of lines, and the number of errors by code."""

    def __init__(self):
        self._sha256 = hashlib.sha256()
        self._num_lines = 0
        self._errors = Counter[str]()

    def hash_lines(self, answers: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
        """Yield the output's lines, while hashing and counting them."""
        for about, answer in answers:
            line = answer + b"\n"
            self._sha256.update(line)
            self._num_lines += 1
            self._errors.update([str(about["error"])] if "error" in about else [])
            yield line

    def to_report(self) -> Report:
        errors = {"errors": self._errors.total(), "internal_errors": self._errors[INTERNAL_ERROR]}
        return {"sha256": self._sha256.hexdigest(), "lines": self._num_lines, **errors}

    @property
    def error_summary(self) -> str:
        """End of the final message: the number of errors; empty if there are none."""
        wrong, internal = self._errors.total(), self._errors[INTERNAL_ERROR]
        text = f", {wrong} of them with an error" if wrong else ""
        return text + (f" ({internal} internal: the report says where)" if internal else "")


def raise_if_refused(reason: str) -> None:
    if reason:
        raise JobError(reason)


def is_job_complete(files: JobFiles, fingerprint: Mapping[str, str]) -> bool:
    """Return whether the output exists, is complete and unchanged, and has this fingerprint."""
    with wrap_os_errors(files.output):
        report = read_job_report(files.report)
        return bool(
            report
            and not fingerprint_differences(report["fingerprint"], fingerprint)
            and files.output.is_file()
            and report["output"]["sha256"] == hash_file(files.output)
        )


def output_obstacle(files: JobFiles, fingerprint: Mapping[str, str]) -> str:
    """Return why the output must not be written: a file with content has its name. Returns "" if none has."""
    output = files.output
    with wrap_os_errors(output):
        if not output.exists() or (output.is_file() and not output.stat().st_size):
            return ""
        report = read_job_report(files.report)
        if report is None or not output.is_file():
            return f"{output} exists and is not a result of this command; remove it or choose another output"
        differences = fingerprint_differences(report["fingerprint"], fingerprint)
        if differences:
            return (
                f"{output} is the result of another job:\n{differences}\nremove it or choose another output"
            )
        return f"{output} was changed since it was finished; remove it or choose another output"


def report_obstacle(report_path: Path) -> str:
    """Return why the report must not be written: a file that is no report of this command has its name.
    Returns "" if none has."""
    with wrap_os_errors(report_path):
        if not os.path.lexists(report_path) or (
            not report_path.is_symlink() and read_job_report(report_path) is not None
        ):
            return ""
    return f"{report_path} exists and is not a report of this command; remove it, or choose another output"


def check_distinct_files(job_input: JobInput, files: JobFiles, report_file: str | None) -> None:
    """Raise JobError if the input, the output, its journal or reports are the same file, also under other
    names."""
    named_paths = {
        "the output": files.output,
        "the job's journal": files.journal,
        "the job's report": files.report,
    }
    report_path = None if report_file is None else Path(os.path.realpath(report_file))
    for what, path in {**named_paths, "--report": report_path}.items():
        path_status = None if path is None else file_status(path)
        if path_status is not None and job_input.is_same_file(path_status):
            raise JobError(f"{path} is the input and {what}: they must be two files")
    for what, path in named_paths.items():
        if report_path == Path(os.path.realpath(path)):
            raise JobError(f"{path} is --report and {what}: they must be two files")


def check_output_folder(files: JobFiles) -> None:
    if not files.output.parent.is_dir():
        raise JobError(f"{files.output.parent} is not a folder")
    if files.output.exists() and not files.output.is_file():
        raise JobError(f"{files.output} is not a file that could be replaced; use - to write to a stream")


def check_replaceable(output: Path, partial: Path) -> None:
    """Raise JobError if a file with the output's name has content that differs from `partial`."""
    if output.exists() and output.stat().st_size and not filecmp.cmp(output, partial, shallow=False):
        raise JobError(f"{output} appeared or was changed while the job ran; move it away")


def check_sampling_defaults(sampling: Mapping[str, Any]) -> None:
    try:
        SamplingParams.from_dict(sampling)
    except (TypeError, ValueError) as error:
        raise JobError(str(error)) from None


def options_fingerprint(options: BatchOptions) -> dict[str, str]:
    """Return the job's options that decide answers, and duetto's version, as facts of the fingerprint."""
    return {
        "duetto": version("duetto"),
        "sampling": msgspec.json.encode(dict(options.sampling), order="sorted").decode(),
        **{name: str(vars(options)[name]) for name in DECIDING_OPTIONS},
    }


def read_job_report(path: Path) -> Report | None:
    """Return a finished job's report; None if `path` does not exist or is no report."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        msgspec.convert(report, ReportHead)
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    return report


class ReportHead(msgspec.Struct):
    """Fields by which a report of this command is recognised."""

    fingerprint: dict[str, str]
    started: str
    output: dict[str, str | int]
    requests: list[dict[str, Any]]

    def __post_init__(self):
        if type(self.output.get("sha256")) is not str:
            raise ValueError("a report without its output's hash")


def encode_report_pieces(report: Report, requests: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the report as pieces of JSON, with an entry for each line. Entries are read one at a time."""
    yield msgspec.json.encode(report)[:-1] + b',"requests":['
    for i, about in enumerate(requests):
        entry = {k: v for k, v in about.items() if k not in ("index", "digest")}
        yield (b",\n" if i else b"\n") + msgspec.json.encode(entry)
    yield b"\n]}\n"


def print_batch_message(text: str, hint: str = "") -> None:
    """Write a message of the command to standard error, with `hint` on a line of its own."""
    print_stderr("\n".join(["duetto batch: " + text, *([hint] if hint else [])]))
