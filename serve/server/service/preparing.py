"""From tasks to flows: prompts are tokenized and grammars compiled without blocking other requests."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive

from ....lora.request import LoRARequest
from ....model.pooling import PoolingParams
from ....sampling.params import SamplingParams
from ...host.threads import finished
from ...llm.driver import Driver, StreamHandle
from ...llm.llm import LLM
from ...text.grammar.grammars import CompileJob
from ...text.openai.errors import RequestError
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, params_for, prompt_ids, task_error
from ...text.tokenizer.chat import ChatTemplateError
from .streams import while_read


@dataclass(frozen=True)
class PreparedPrompt:
    """A task with its tokenized prompt, and the grammar that it waits for, if any."""

    task: Task
    prompt: list[int]
    params: SamplingParams | PoolingParams
    wanted: CompileJob | None

    @property
    def is_ready(self) -> bool:
        return self.wanted is None or self.wanted.future.done()


T = TypeVar("T")
Begun = tuple[list[PreparedPrompt], list[StreamHandle] | None]


class TaskPreparer:
    """Makes flows of tasks for an engine's driver. Tasks may name one of the `adapters` as their model."""

    def __init__(self, llm: LLM, driver: Driver, replies: Replies):
        self._llm, self._driver, self._replies = llm, driver, replies

    async def flows(
        self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest], receive: Receive | None
    ) -> list[StreamHandle]:
        """Return the flows of tasks. Raises RequestError for what is not allowed; ClientLeft if `receive`
        reports a disconnect before the grammars are compiled."""
        reads, flows = await finished(lambda: self._begun(tasks, adapters), self._undo)
        try:
            if flows is not None:
                return flows
            await self._grammars(reads, receive)
            return await finished(lambda: self._flows(reads, adapters), self.leave)
        finally:
            leave_all(reads)

    def leave(self, flows: Sequence[StreamHandle]) -> None:
        """Drop flows that have not begun, so that their ids are free again."""
        for flow in flows:
            self._driver.leave(flow)

    def _begun(self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest]) -> Begun:
        """Tokenize tasks, and make their flows unless a grammar is still being compiled."""
        reads = all_of(map(self._read, tasks), leave_all)
        return reads, self._flows(reads, adapters) if all(read.is_ready for read in reads) else None

    def _undo(self, begun: Begun) -> None:
        reads, flows = begun
        leave_all(reads)
        self.leave(flows or [])

    async def _grammars(self, reads: Sequence[PreparedPrompt], receive: Receive | None) -> None:
        for read in reads:
            if read.wanted is None:
                continue
            with refusals(read.task):
                grammar = asyncio.wrap_future(read.wanted.future)
                await (grammar if receive is None else while_read(receive, grammar))

    def _read(self, task: Task) -> PreparedPrompt:
        with refusals(task):
            prompt = prompt_ids(task, self._llm.tokenizer, self._llm.longest_prompt, task.now)
            params = task.pooling or params_for(task, self._replies.dialect, prompt)
            shape = None if isinstance(params, PoolingParams) else params.structured_outputs
            grammars = self._llm.input_processor.grammars
            return PreparedPrompt(task, prompt, params, None if shape is None else grammars.wanted(shape))

    def _flows(
        self, reads: Sequence[PreparedPrompt], adapters: Mapping[str, LoRARequest]
    ) -> list[StreamHandle]:
        return all_of((self._flow(read, adapters) for read in reads), self.leave)

    def _flow(self, read: PreparedPrompt, adapters: Mapping[str, LoRARequest]) -> StreamHandle:
        with refusals(read.task):
            adapter = adapters.get(read.task.model or "")
            own = self._llm.session, self._llm.input_processor
            return StreamHandle(*own, read.prompt, read.params, read.task.known, adapter)


def all_of(values: Iterable[T], undo: Callable[[list[T]], None]) -> list[T]:
    """Return all values of an iterator; if it raises, `undo` those before."""
    found: list[T] = []
    try:
        found.extend(values)
    except BaseException:
        undo(found)
        raise
    return found


def leave_all(reads: Sequence[PreparedPrompt]) -> None:
    """Stop waiting for the grammars of prompts."""
    for read in reads:
        if read.wanted is not None:
            read.wanted.leave()


@contextmanager
def refusals(task: Task) -> Iterator[None]:
    """Turn errors of a task into RequestError, by the field of its body."""
    try:
        yield
    except RequestError:
        raise
    except ChatTemplateError as error:
        raise RequestError("chat_template_error", str(error), "messages") from None
    except (ValueError, TypeError) as error:
        raise task_error(task, error) from None
