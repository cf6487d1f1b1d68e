"""Conversion of tasks to requests of the engine's driver, as handles. Prompts are tokenized and grammars
compiled without blocking other requests."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ....lora.request import LoRARequest
from ....model.pooling import PoolingParams
from ....sampling.params import SamplingParams
from ...llm.driver import Driver, StreamHandle
from ...llm.llm import LLM
from ...text.cache_salt import prompt_with_salt
from ...text.grammar.compiler import CompileJob
from ...text.openai.errors import RequestError
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, make_task_error, task_sampling_params, tokenize_prompt
from ...text.tokenizer.chats.chat import ChatTemplateError
from .admission import ClientBody


@dataclass(frozen=True)
class PreparedPrompt:
    """A task with its tokenized prompt.

    params: of its request
    grammar_job: compilation of its grammar; None if it has none
    """

    task: Task
    prompt: list[int]
    params: SamplingParams | PoolingParams
    grammar_job: CompileJob | None

    @property
    def is_ready(self) -> bool:
        return self.grammar_job is None or self.grammar_job.future.done()


T = TypeVar("T")
BegunTasks = tuple[list[PreparedPrompt], list[StreamHandle] | None]


class TaskPreparer:
    """Converts tasks to handles of requests of an engine's driver. A task may name an adapter as its
    model."""

    def __init__(self, llm: LLM, driver: Driver, replies: Replies):
        self._llm, self._driver, self._replies = llm, driver, replies

    async def prepare_handles(
        self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest], client_body: ClientBody
    ) -> list[StreamHandle]:
        """Tokenize tasks, wait for their grammars, and return their handles. Raises RequestError for a
        wrong task, and as `ClientBody.run` does."""
        prepared_prompts, handles = await client_body.run_in_thread(
            lambda: self._begin_tasks(tasks, adapters), self._undo_begin
        )
        try:
            if handles is not None:
                return handles
            await self._wait_grammars(prepared_prompts, client_body)
            return await client_body.run_in_thread(
                lambda: self._make_handles(prepared_prompts, adapters), self.drop_handles
            )
        finally:
            drop_grammar_jobs(prepared_prompts)

    def drop_handles(self, handles: Sequence[StreamHandle]) -> None:
        """Drop requests of the driver that have not begun, so that their ids are free again."""
        for handle in handles:
            self._driver.drop_request(handle)

    def _begin_tasks(self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest]) -> BegunTasks:
        """Tokenize tasks, and make their handles; None if a grammar is still being compiled."""
        prepared_prompts = collect_or_undo(map(self._prepare_prompt, tasks), drop_grammar_jobs)
        return prepared_prompts, self._make_handles(prepared_prompts, adapters) if all(
            prepared.is_ready for prepared in prepared_prompts
        ) else None

    def _undo_begin(self, begun: BegunTasks) -> None:
        prepared_prompts, handles = begun
        drop_grammar_jobs(prepared_prompts)
        self.drop_handles(handles or [])

    async def _wait_grammars(
        self, prepared_prompts: Sequence[PreparedPrompt], client_body: ClientBody
    ) -> None:
        for prepared in prepared_prompts:
            if prepared.grammar_job is None:
                continue
            with convert_task_errors(prepared.task):
                await client_body.await_while_connected(asyncio.wrap_future(prepared.grammar_job.future))

    def _prepare_prompt(self, task: Task) -> PreparedPrompt:
        with convert_task_errors(task):
            prompt = tokenize_prompt(task, self._llm.tokenizer, self._llm.longest_prompt, task.now)
            params = task.pooling or task_sampling_params(task, self._replies.dialect, prompt)
            grammar = None if isinstance(params, PoolingParams) else params.structured_outputs
            grammars = self._llm.input_processor.grammars
            return PreparedPrompt(task, prompt, params, None if grammar is None else grammars.submit(grammar))

    def _make_handles(
        self, prepared_prompts: Sequence[PreparedPrompt], adapters: Mapping[str, LoRARequest]
    ) -> list[StreamHandle]:
        return collect_or_undo(
            (self._make_handle(prepared, adapters) for prepared in prepared_prompts), self.drop_handles
        )

    def _make_handle(self, prepared: PreparedPrompt, adapters: Mapping[str, LoRARequest]) -> StreamHandle:
        with convert_task_errors(prepared.task):
            adapter = adapters.get(prepared.task.model or "")
            engine_parts = self._llm.session, self._llm.input_processor
            prompt = prompt_with_salt(prepared.prompt, prepared.task.cache_salt)
            return StreamHandle(
                *engine_parts, prompt, prepared.params, prepared.task.resumed_outputs, adapter
            )


def collect_or_undo(values: Iterable[T], undo: Callable[[list[T]], None]) -> list[T]:
    """Return all values of an iterator. If it raises, call `undo` with the values so far."""
    collected: list[T] = []
    try:
        collected.extend(values)
    except BaseException:
        undo(collected)
        raise
    return collected


def drop_grammar_jobs(prepared_prompts: Sequence[PreparedPrompt]) -> None:
    """Stop waiting for the grammars of prompts."""
    for prepared in prepared_prompts:
        if prepared.grammar_job is not None:
            prepared.grammar_job.release()


@contextmanager
def convert_task_errors(task: Task) -> Iterator[None]:
    """Convert errors in the block to RequestErrors that name the field of the task's body."""
    try:
        yield
    except RequestError:
        raise
    except ChatTemplateError as error:
        raise RequestError("chat_template_error", str(error), "messages") from None
    except (ValueError, TypeError) as error:
        raise make_task_error(task, error) from None
