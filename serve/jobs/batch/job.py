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
from ...host.files import JobError, disk, write_all
from ...host.signals import Interrupts
from ...host.streams import Messages
from ...text.openai.errors import RequestError, encodable
from ...text.openai.replies import usage
from ...text.openai.tasks import Task, params_for, prompt_ids
from ...text.outputs import RequestOutput
from ...text.tokenizer.chat import ChatTemplateError
from ...text.tokenizer.tokenizer import Tokenizer
from .answers import Answers
from .lines import INTERNAL, Address, RawLine, address_of, decode, task_of
from .source import JobInput

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")
WAITING = 4096  # answers that may wait in memory for an earlier one
MESSAGE = 500  # characters of an internal error's message
TRACE = 8  # entries of a traceback that the report keeps


@dataclass(frozen=True)
class BatchOptions:
    """Settings of a job."""

    in_flight: int = 128  # lines in the engine at once; four times max_num_seqs keeps it busy
    seed: int = 0  # from which, and its number, each line without a seed gets one
    sampling: Mapping[str, Any] = field(default_factory=dict)  # parameters of lines that do not give them
    model_name: str = "duetto"  # in answers to lines that name no model
    max_line_bytes: int = 8 << 20  # a longer line is answered with an error
    progress: bool = True  # show a progress bar
    explain: bool = False  # add a table of the compiled programs to the report
    save_cache: str | None = None  # folder for what the engine's cache holds at the end
    adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # by the model name that selects each
    tool_call_parser: str | None = None  # name of the notation of tool calls


class BatchEngine(Protocol):
    """The part of an LLM that a job uses. `add_request` raises ValueError or TypeError for a wrong
    request."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def longest_prompt(self) -> int: ...
    def add_request(
        self, prompt: list[int], params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None
    ) -> object: ...
    def expect(self, requests: int) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def report(self, explained: bool = False) -> dict[str, Any]: ...
    def save_cache(self, path: str) -> int: ...
    def close(self) -> None: ...


class Sink(Protocol):
    """Destination of answers. A line is identified by its index and its digest.

    `count` lines have an answer from an earlier run, of engines with these `products` (see `LLM.report`).
    """

    @property
    def products(self) -> Collection[str]: ...

    @property
    def count(self) -> int: ...
    def has(self, index: int, digest: int) -> bool: ...
    def has_room(self) -> bool: ...
    def append(self, index: int, digest: int, answer: bytes, about: Mapping[str, Any]) -> None: ...
    def sync(self) -> None: ...


class OrderedStream:
    """Writes answers to a descriptor in the order of their lines; early ones wait in memory."""

    count = 0
    products: Collection[str] = ()

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._waiting: dict[int, bytes] = {}
        self._next = 0

    def has(self, index: int, digest: int) -> bool:
        return False

    def has_room(self) -> bool:
        return len(self._waiting) < WAITING

    def append(self, index: int, digest: int, answer: bytes, about: Mapping[str, Any]) -> None:
        self._waiting[index] = answer

    def sync(self) -> None:
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next) + b"\n")
            self._next += 1
        try:
            write_all(self._descriptor, b"".join(ready))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise JobError(f"standard output: {error.strerror}") from error


class BatchJob:
    """Runs the lines of `source` that `sink` has no answer for. The first line to run starts the engine.

    `engine_report` is the engine's report after the pass; None if no line needed an engine.
    """

    def __init__(
        self,
        start_engine: Callable[[], BatchEngine],
        source: JobInput,
        sink: Sink,
        options: BatchOptions,
        interrupts: Interrupts,
        now: datetime,
    ):
        self._start_engine = start_engine
        self._source = source
        self._sink = sink
        self._options = options
        self._interrupts, self._now = interrupts, now
        self._engine: BatchEngine | None = None
        self._products: str | None = None
        self._answers = Answers(source.sha256, options.model_name)
        self._running: dict[str, tuple[RawLine, Task]] = {}
        self._ids: set[bytes] = set()
        self._address = Address(openai=False)  # of the line that is being taken
        self._openai = False
        self._progress = JobProgress(source.count, sink.count, options.progress)
        self.engine_report: dict[str, Any] | None = None

    def run(self) -> None:
        """Answer all lines. Raises JobError or Interrupted; answers until then are in the sink."""
        lines = self._source.lines()
        try:
            while self._fill(lines) or self._running:
                self._step()
            if self._engine is not None:
                self.engine_report = self._engine.report(self._options.explain)
                if self._options.save_cache:
                    with disk(self._options.save_cache):
                        self._engine.save_cache(self._options.save_cache)
        finally:
            self._progress.close()
            try:
                self._sink.sync()
            finally:
                if self._engine is not None:
                    self._engine.close()

    def _fill(self, lines: Iterator[RawLine]) -> bool:
        """Take lines up to the number that may be in flight; return whether there may be more."""
        while len(self._running) < self._options.in_flight and self._sink.has_room():
            line = next(lines, None)
            if line is None:
                return False
            self._take(line)
        return True

    def _step(self) -> None:
        with self._interrupts.deferred():
            for output in self._outputs():
                line, task = self._running.pop(output.request_id)
                answer = self._answers.result(line.number, task, output)
                self._sink.append(line.index, line.digest, answer, about(line, output, self._products))
                self._progress.answered(output)
            self._sink.sync()

    def _outputs(self) -> list[RequestOutput]:
        """Run a step and return its finished outputs; the engine is given the number of lines to come."""
        if self._engine is None or not self._running:
            return []
        self._engine.expect(self._progress.unanswered - len(self._running))
        return self._engine.step()

    def _take(self, line: RawLine) -> None:
        """Add a line to the engine, or answer with its error. Lines with an answer are only read."""
        self._address = Address(self._openai)
        task = self._tried(line, self._read)
        if task is not None:
            engine = self._engine or self._load()
            self._tried(line, lambda line: self._submit(line, task, engine))

    def _tried(self, line: RawLine, work: Callable[[RawLine], T]) -> T | None:
        """Return what `work` makes of a line; None if it raises: any exception is the line's error."""
        with self._interrupts.deferred():
            try:
                return work(line)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - libraries raise anything
                self._refuse(line, error)
                return None

    def _refuse(self, line: RawLine, error: Exception) -> None:
        if self._sink.has(line.index, line.digest):
            return
        refusal = line_error(error)
        about: dict[str, Any] = {"line": line.number, "error": refusal.code}
        if refusal.code == INTERNAL:
            about["trace"] = [encodable(entry) for entry in traceback.format_exception(error)[-TRACE:]]
        answer = self._answers.error(line.number, self._address, refusal)
        self._sink.append(line.index, line.digest, answer, about)
        self._progress.answered()

    def _read(self, line: RawLine) -> Task | None:
        """Return a line's task; None if it has an answer."""
        value = decode(line, self._options.max_line_bytes)
        self._address = address_of(value)
        self._openai = self._address.openai
        self._check_unused(self._address.id)
        if self._sink.has(line.index, line.digest):
            return None
        return task_of(value, self._options.sampling, self._seed(line))

    def _submit(self, line: RawLine, task: Task, engine: BatchEngine) -> None:
        try:
            prompt = prompt_ids(task, engine.tokenizer, engine.longest_prompt, self._now)
            params = params_for(task, self._answers.replies.dialect, prompt)
            adapter = self._options.adapters.get(task.model or "")
            engine.add_request(prompt, params, str(line.index), lora_request=adapter)
        except ChatTemplateError as error:
            raise RequestError("chat_template_error", str(error)) from None
        except (ValueError, TypeError) as error:
            raise RequestError("invalid_request", str(error)) from None
        self._running[str(line.index)] = line, task

    def _load(self) -> BatchEngine:
        try:
            self._engine = self._start_engine()
            self._engine.expect(self._progress.unanswered)
        except (OSError, ValueError, RuntimeError) as error:  # jax's own are RuntimeErrors
            raise JobError(f"the model cannot be loaded: {error}") from error
        self._interrupts.check()
        self._check_products(self._engine)
        options, tokenizer = self._options, self._engine.tokenizer
        self._answers = Answers(self._source.sha256, options.model_name, tokenizer, options.tool_call_parser)
        self._progress.begin()
        return self._engine

    def _check_products(self, engine: BatchEngine) -> None:
        """Raise JobError if an accelerator's compiler had configured products otherwise for earlier answers:
        their bits may differ."""
        self._products = engine.report().get("products")
        others = {name for name in self._sink.products if name != self._products}
        if others:
            raise JobError(
                f"the answers of this job come of products {', '.join(sorted(others))}, this engine's are "
                f"{self._products}: XLA's autotuning, or dtype auto on a host, chose otherwise; bring the "
                "compiled programs of the machine that began the job (--compilation-cache), or choose "
                "another output"
            )

    def _seed(self, line: RawLine) -> int:
        """Return 64 bits for a line without a seed of its own."""
        return int.from_bytes(sha256(f"{self._options.seed} {line.number}".encode()).digest()[:8], "big")

    def _check_unused(self, name: str | int | None) -> None:
        if name is None:
            return
        known = blake2b(msgspec.json.encode(name), digest_size=16).digest()
        if known in self._ids:
            raise RequestError("duplicate_id", f"an earlier line has the same id, {str(name)[:60]}")
        self._ids.add(known)


class JobProgress:
    """A bar on standard error: lines answered, and tokens per second of prompts and outputs together.

    It appears, and its clock starts, when the engine is ready; `before` lines have an earlier answer.
    """

    def __init__(self, total: int, before: int, shown: bool):
        self._total, self._done, self._shown = total, before, shown
        self._bar: tqdm[NoReturn] | None = None
        self._tokens, self._since = 0, 0.0

    def begin(self) -> None:
        from tqdm import tqdm

        self._since = time.monotonic()
        self._bar = tqdm(
            total=self._total,
            initial=self._done,
            unit="line",
            mininterval=0.5,
            disable=not self._shown,
            dynamic_ncols=True,
            file=Messages(),
        )

    @property
    def unanswered(self) -> int:
        """Lines without an answer."""
        return self._total - self._done

    def answered(self, output: RequestOutput | None = None) -> None:
        self._done += 1
        if self._bar is None:
            return
        if output is not None:
            self._tokens += usage(output)["total_tokens"]
            rate = self._tokens / max(time.monotonic() - self._since, 1e-9)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def line_error(error: Exception) -> RequestError:
    """Return a line's error for an exception; an unexpected one has the code INTERNAL and its type's name."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RecursionError):
        return RequestError("invalid_request", "the line, or JSON text in it, is nested too deeply")
    return RequestError(INTERNAL, f"internal error, {type(error).__name__}: {error}"[:MESSAGE])


def about(line: RawLine, output: RequestOutput, products: str | None) -> dict[str, Any]:
    """Return a line's entry in the report: tokens, seconds if the engine measured them, and how an
    accelerator's products were configured."""
    named = {} if products is None else {"products": products}
    counts = {"line": line.number, **usage(output), "cached_tokens": output.num_cached_tokens, **named}
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
