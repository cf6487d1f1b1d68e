"""Conversion of tasks to subscriptions. Prompts are tokenized and grammars compiled without blocking other
requests."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ....lora.request import LoRARequest
from ...llm.llm import LLM
from ...llm.subscription import Subscription
from ...text.cache_salt import prompt_with_salt
from ...text.grammar.compiler import CompileJob
from ...text.openai.errors import RequestError
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, make_task_error, task_sampling_params, tokenize_prompt
from ...text.tokenizer.chats.chat import ChatTemplateError
from .body_admission import ClientBody

GrammarJobs = list[CompileJob | None]  # compilation of each task's grammar, if it has one
BegunTasks = tuple[list[Task], GrammarJobs, list[Subscription] | None]


class TaskPreparer:
    """Converts tasks to subscriptions. A task may name an adapter as its model."""

    def __init__(self, llm: LLM, replies: Replies):
        self._llm, self._replies = llm, replies

    async def prepare_subscriptions(
        self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest], client_body: ClientBody
    ) -> list[Subscription]:
        """Tokenize tasks, wait for their grammars, and subscribe to them. Raises RequestError for a wrong
        task, and as `ClientBody.run_in_thread` does."""
        tokenized, jobs, subscriptions = await client_body.run_in_thread(
            lambda: self._begin_tasks(tasks, adapters), lambda begun: release_jobs(begun[1])
        )
        try:
            if subscriptions is None:
                await wait_grammars(tokenized, jobs, client_body)
                subscribe = partial(self._subscribe_all, tokenized, adapters)
                subscriptions = await client_body.run_in_thread(subscribe)
            return subscriptions
        finally:
            release_jobs(jobs)

    def _begin_tasks(self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest]) -> BegunTasks:
        """Tokenize tasks, begin to compile their grammars, and subscribe to them if no grammar is compiled
        still."""
        tokenized, jobs = list(map(self._tokenize, tasks)), GrammarJobs()
        try:
            jobs.extend(map(self._begin_grammar, tokenized))
            is_ready = all(job is None or job.future.done() for job in jobs)
            return tokenized, jobs, self._subscribe_all(tokenized, adapters) if is_ready else None
        except BaseException:
            release_jobs(jobs)
            raise

    def _tokenize(self, task: Task) -> Task:
        """Return a task with the token ids of its prompt, and the sampling parameters that its form needs."""
        with convert_task_errors(task):
            prompt = tokenize_prompt(task, self._llm.tokenizer, self._llm.longest_prompt, task.now)
            params = (
                task.params if task.pooling else task_sampling_params(task, self._replies.dialect, prompt)
            )
            return replace(task, prompt=prompt, params=params)

    def _begin_grammar(self, task: Task) -> CompileJob | None:
        grammar = None if task.pooling else task.params.structured_outputs
        with convert_task_errors(task):
            return None if grammar is None else self._llm.input_processor.grammars.submit(grammar)

    def _subscribe_all(
        self, tasks: Sequence[Task], adapters: Mapping[str, LoRARequest]
    ) -> list[Subscription]:
        return [self._subscribe(task, adapters) for task in tasks]

    def _subscribe(self, task: Task, adapters: Mapping[str, LoRARequest]) -> Subscription:
        with convert_task_errors(task):
            assert isinstance(task.prompt, list), "the task is tokenized"
            return self._llm.input_processor.make_subscription(
                prompt_with_salt(task.prompt, task.cache_salt),
                task.pooling or task.params,
                resumed_outputs=task.resumed_outputs,
                lora_request=adapters.get(task.model or ""),
            )


async def wait_grammars(tasks: Sequence[Task], jobs: GrammarJobs, client_body: ClientBody) -> None:
    """Wait for the grammars of tasks. Raises RequestError for a wrong one, and as
    `ClientBody.await_while_connected` does."""
    for task, job in zip(tasks, jobs, strict=True):
        if job is not None:
            with convert_task_errors(task):
                await client_body.await_while_connected(asyncio.wrap_future(job.future))


def release_jobs(jobs: GrammarJobs) -> None:
    """Stop waiting for the grammars of tasks."""
    for job in jobs:
        if job is not None:
            job.release()


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
