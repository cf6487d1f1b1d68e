"""A pass over a batch's lines: lines without an answer go through the engine, answers to a sink."""

import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec

from ....lora.request import LoRARequest
from ....sampling.params import SamplingParams
from ...host.files import JobError, wrap_os_errors, write_all
from ...host.signals import Interrupts
from ...host.streams import SafeStderr
from ...text.cache_salt import prompt_with_salt
from ...text.openai.errors import RequestError, escape_surrogates
from ...text.openai.replies import token_usage
from ...text.openai.tasks import Task, task_sampling_params, tokenize_prompt
from ...text.outputs import GenerationError, RequestOutput, require_finite_logits
from ...text.tokenizer.chats.chat import ChatTemplateError
from ...text.tokenizer.tokenizer import Tokenizer
from .answers import AnswerFormatter
from .job_input import JobInput
from .lines import INTERNAL_ERROR, LineIdentity, RawLine, decode_line, read_line_identity, read_line_task

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
MAX_WAITING_ANSWERS = 4096  # answers that may wait in memory for an earlier one
MAX_LINE_ERROR_CHARS = 500  # characters of an internal error's message
MAX_TRACE_ENTRIES = 8  # entries of a traceback that the report keeps


@dataclass(frozen=True)
class BatchOptions:
    """Settings of a batch job."""

    in_flight: int = 128  # lines in the engine at once; four times max_num_seqs keeps it busy
    seed: int = 0  # a line without a seed gets a hash of this and of its number
    sampling: Mapping[str, Any] = field(default_factory=dict)  # parameters of lines that do not give them
    model_name: str = "duetto"  # model name in answers to lines that name none
    max_line_bytes: int = 8 << 20  # a longer line is answered with an error
    progress: bool = True  # show a progress bar
    explain: bool = False  # add a table of the compiled programs to the report
    save_cache: str | None = None  # folder for what the engine's cache holds at the end
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # by the model name that selects each
    tool_call_parser: str | None = None  # name of the notation of tool calls


class BatchEngine(Protocol):
    """Methods of an LLM that a job calls. `add_request` raises ValueError or TypeError for a wrong
    request."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def longest_prompt(self) -> int: ...
    def add_request(
        self, prompt: Any, params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None
    ) -> object: ...
    def expect(self, requests: int) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def report(self, explained: bool = False) -> dict[str, Any]: ...
    def save_cache(self, path: str) -> int: ...
    def close(self) -> None: ...


class AnswerSink(Protocol):
    """Destination of answers. A line is identified by its index and its digest.

    products: `products` in the reports of the engines that answered earlier (see `LLM.report`)
    num_answered: lines that have an answer from an earlier run
    """

    @property
    def products(self) -> Collection[str]: ...

    @property
    def num_answered(self) -> int: ...
    def has_answer(self, index: int, digest: int) -> bool: ...
    def has_room(self) -> bool: ...
    def append(self, index: int, digest: int, answer: bytes, report_entry: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...


class OrderedStream:
    """Writes answers to a file descriptor in the order of their lines. Early answers wait in memory."""

    num_answered = 0
    products: Collection[str] = ()

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._waiting: dict[int, bytes] = {}
        self._next_index = 0

    def has_answer(self, index: int, digest: int) -> bool:
        return False

    def has_room(self) -> bool:
        return len(self._waiting) < MAX_WAITING_ANSWERS

    def append(self, index: int, digest: int, answer: bytes, report_entry: Mapping[str, Any]) -> None:
        self._waiting[index] = answer

    def sync(self) -> None:
        ready = []
        while self._next_index in self._waiting:
            ready.append(self._waiting.pop(self._next_index) + b"\n")
            self._next_index += 1
        try:
            write_all(self._descriptor, b"".join(ready))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise JobError(f"standard output: {error.strerror}") from error


class BatchJob:
    """Runs the lines of `job_input` that have no answer in `sink`. The first line to run starts the engine.

    engine_report: the engine's report after the pass; None if no line needed an engine
    """

    def __init__(
        self,
        start_engine: Callable[[], BatchEngine],
        job_input: JobInput,
        sink: AnswerSink,
        options: BatchOptions,
        interrupts: Interrupts,
        now: datetime,
    ):
        self._start_engine = start_engine
        self._job_input = job_input
        self._sink = sink
        self._options = options
        self._interrupts, self._now = interrupts, now
        self._engine: BatchEngine | None = None
        self._products: str | None = None
        self._answer_formatter = AnswerFormatter(job_input.sha256, options.model_name)
        self._running: dict[str, tuple[RawLine, Task]] = {}
        self._ids: set[bytes] = set()
        self._line_identity = LineIdentity(is_openai=False)  # of the line that is being taken or answered
        self._is_openai = False
        self._progress = JobProgress(job_input.num_lines, sink.num_answered, options.progress)
        self.engine_report: dict[str, Any] | None = None

    def run(self) -> None:
        """Answer all lines. Raises JobError or Interrupted; the sink then has the answers so far."""
        lines = self._job_input.read_lines()
        try:
            while self._fill_engine(lines) or self._running:
                self._run_step()
            if self._engine is not None:
                self.engine_report = self._engine.report(self._options.explain)
                if self._options.save_cache:
                    with wrap_os_errors(self._options.save_cache):
                        self._engine.save_cache(self._options.save_cache)
        finally:
            self._progress.close()
            try:
                self._sink.sync()
            finally:
                if self._engine is not None:
                    self._engine.close()

    def _fill_engine(self, lines: Iterator[RawLine]) -> bool:
        """Start lines until `in_flight` of them run. Returns whether there may be more lines."""
        while len(self._running) < self._options.in_flight and self._sink.has_room():
            line = next(lines, None)
            if line is None:
                return False
            self._start_line(line)
        return True

    def _run_step(self) -> None:
        with self._interrupts.defer_signals():
            for output in self._step_engine():
                self._answer_line(*self._running.pop(output.request_id), output)
            self._sink.sync()

    def _answer_line(self, line: RawLine, task: Task, output: RequestOutput) -> None:
        """Append the answer to a finished line. The answer is an error if the model computed NaN, or if its
        JSON cannot be written."""
        self._line_identity = LineIdentity(task.form != "plain", task.id)
        answer = self._run_or_answer_error(line, lambda line: self._format_answer(line, task, output))
        if answer is not None:
            self._sink.append(
                line.index, line.digest, answer, line_report_entry(line, output, self._products)
            )
            self._progress.on_answer(output)

    def _format_answer(self, line: RawLine, task: Task, output: RequestOutput) -> bytes:
        require_finite_logits(output)
        return self._answer_formatter.format_result(line.number, task, output)

    def _step_engine(self) -> list[RequestOutput]:
        """Tell the engine how many lines are still to come, run a step, and return its finished outputs."""
        if self._engine is None or not self._running:
            return []
        self._engine.expect(self._progress.num_unanswered - len(self._running))
        return self._engine.step()

    def _start_line(self, line: RawLine) -> None:
        """Add a line to the engine, or answer it with its error. A line that has an answer is only read."""
        self._line_identity = LineIdentity(self._is_openai)
        task = self._run_uninterrupted(line, self._read_task)
        if task is not None:
            engine = self._engine or self._load_engine()
            self._run_uninterrupted(line, lambda line: self._submit_task(line, task, engine))

    def _run_uninterrupted(self, line: RawLine, work: Callable[[RawLine], T]) -> T | None:
        """Call `_run_or_answer_error` with signals deferred."""
        with self._interrupts.defer_signals():
            return self._run_or_answer_error(line, work)

    def _run_or_answer_error(self, line: RawLine, work: Callable[[RawLine], T]) -> T | None:
        """Return the result of `work` on a line. If it raises, answer the line with the error; return
        None."""
        try:
            return work(line)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries raise anything
            self._answer_error(line, error)
            return None

    def _answer_error(self, line: RawLine, error: Exception) -> None:
        if self._sink.has_answer(line.index, line.digest):
            return
        refusal = line_error(error)
        report_entry: dict[str, Any] = {"line": line.number, "error": refusal.code}
        if refusal.code == INTERNAL_ERROR:
            report_entry["trace"] = [
                escape_surrogates(entry) for entry in traceback.format_exception(error)[-MAX_TRACE_ENTRIES:]
            ]
        answer = self._answer_formatter.format_error(line.number, self._line_identity, refusal)
        self._sink.append(line.index, line.digest, answer, report_entry)
        self._progress.on_answer()

    def _read_task(self, line: RawLine) -> Task | None:
        """Return a line's task; None if the line has an answer."""
        value = decode_line(line, self._options.max_line_bytes)
        self._line_identity = read_line_identity(value)
        self._is_openai = self._line_identity.is_openai
        self._register_id(self._line_identity.id)
        if self._sink.has_answer(line.index, line.digest):
            return None
        return read_line_task(value, self._options.sampling, self._line_seed(line))

    def _submit_task(self, line: RawLine, task: Task, engine: BatchEngine) -> None:
        try:
            prompt = tokenize_prompt(task, engine.tokenizer, engine.longest_prompt, self._now)
            params = task_sampling_params(task, self._answer_formatter.replies.dialect, prompt)
            adapter = self._options.adapters.get(task.model or "")
            salted = prompt_with_salt(prompt, task.cache_salt)
            engine.add_request(salted, params, str(line.index), lora_request=adapter)
        except ChatTemplateError as error:
            raise RequestError("chat_template_error", str(error)) from None
        except (ValueError, TypeError) as error:
            raise RequestError("invalid_request", str(error)) from None
        self._running[str(line.index)] = line, task

    def _load_engine(self) -> BatchEngine:
        try:
            self._engine = self._start_engine()
            self._engine.expect(self._progress.num_unanswered)
        except (OSError, ValueError, RuntimeError) as error:  # jax's own are RuntimeErrors
            raise JobError(f"the model cannot be loaded: {error}") from error
        self._interrupts.raise_pending()
        self._check_same_products(self._engine)
        options, tokenizer = self._options, self._engine.tokenizer
        self._answer_formatter = AnswerFormatter(
            self._job_input.sha256, options.model_name, tokenizer, options.tool_call_parser
        )
        self._progress.begin()
        return self._engine

    def _check_same_products(self, engine: BatchEngine) -> None:
        """Raise JobError if the compiler has configured matrix products otherwise than for earlier answers:
        bits may differ."""
        self._products = engine.report().get("products")
        other_products = {name for name in self._sink.products if name != self._products}
        if other_products:
            raise JobError(
                f"the answers of this job come of products {', '.join(sorted(other_products))}, this "
                f"engine's are {self._products}: XLA's autotuning, or dtype auto on a host, chose otherwise; "
                "bring the compiled programs of the machine that began the job (--compilation-cache), or "
                "choose another output"
            )

    def _line_seed(self, line: RawLine) -> int:
        """Return the 64-bit seed of a line that gives none."""
        return int.from_bytes(sha256(f"{self._options.seed} {line.number}".encode()).digest()[:8], "big")

    def _register_id(self, name: str | int | None) -> None:
        if name is None:
            return
        known = blake2b(msgspec.json.encode(name), digest_size=16).digest()
        if known in self._ids:
            raise RequestError("duplicate_id", f"an earlier line has the same id, {str(name)[:60]}")
        self._ids.add(known)


class JobProgress:
    """Progress bar on standard error: lines answered, and tokens per second of prompts and outputs together.

    `begin` shows it and starts its clock, once the engine is ready. `num_answered` lines have an earlier
    answer.
    """

    def __init__(self, total: int, num_answered: int, is_shown: bool):
        self._total, self._num_answered, self._is_shown = total, num_answered, is_shown
        self._bar: tqdm[NoReturn] | None = None
        self._num_tokens, self._start_time = 0, 0.0

    def begin(self) -> None:
        from tqdm import tqdm

        self._start_time = time.monotonic()
        self._bar = tqdm(
            total=self._total,
            initial=self._num_answered,
            unit="line",
            mininterval=0.5,
            disable=not self._is_shown,
            dynamic_ncols=True,
            file=SafeStderr(),
        )

    @property
    def num_unanswered(self) -> int:
        """Number of lines without an answer."""
        return self._total - self._num_answered

    def on_answer(self, output: RequestOutput | None = None) -> None:
        self._num_answered += 1
        if self._bar is None:
            return
        if output is not None:
            self._num_tokens += token_usage(output)["total_tokens"]
            rate = self._num_tokens / max(time.monotonic() - self._start_time, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def line_error(error: Exception) -> RequestError:
    """Convert an exception to a line's error. An unexpected exception gets the code `INTERNAL_ERROR`."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GenerationError):
        return RequestError(error.CODE, str(error))
    if isinstance(error, RecursionError):
        return RequestError("invalid_request", "the line, or JSON text in it, is nested too deeply")
    return RequestError(
        INTERNAL_ERROR, f"internal error, {type(error).__name__}: {error}"[:MAX_LINE_ERROR_CHARS]
    )


def line_report_entry(line: RawLine, output: RequestOutput, products: str | None) -> dict[str, Any]:
    """Return a line's entry in the report: token counts, the configuration of an accelerator's products, and
    seconds if the engine measured them."""
    configured = {} if products is None else {"products": products}
    counts = {
        "line": line.number,
        **token_usage(output),
        "cached_tokens": output.num_cached_tokens,
        **configured,
    }
    if output.metrics is None:
        return counts
    m = output.metrics
    return {
        **counts,
        "queued": m.queued,
        "ttft": m.ttft,
        "tpot": m.tpot,
        "e2e": m.e2e,
        "preemptions": m.preemptions,
    }
