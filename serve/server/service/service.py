"""State shared by all requests of a server: the engine's driver, limits and the shutdown."""

import asyncio
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from ....lora.request import LoRARequest
from ...llm.driver import Driver
from ...llm.llm import LLM
from ...llm.mailbox import Mailbox
from ...llm.subscription import Subscription
from ...llm.weights import set_answer_realm
from ...options.server import ServerOptions
from ...text.cache_salt import client_salt
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task
from ...text.outputs import RequestOutput
from .api_call import ApiCall
from .body_admission import Admission, ClientBody
from .errors import HttpError
from .exposition import EventLoopLag
from .fair_queue import FairQueue
from .task_preparer import TaskPreparer

T = TypeVar("T")


class Service:
    """Serves an LLM to clients. It is made in the event loop, and used only there.

    defaults: sampling parameters of requests that give none
    make_driver: makes the engine's driver
    names: names of the model that requests may give
    answer_realm: realm of the answers
    error: error of the engine, once it has failed
    ended: set once the engine has failed, or once `start_draining` was called and all requests are done
    """

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions,
        defaults: Mapping[str, Any],
        make_driver: Callable[..., Driver] = Driver,
    ):
        self.llm, self.options = llm, options
        self.names = list(options.served_model_name or ["demo"])
        self.defaults = dict(defaults)
        self.replies = Replies(self.names[0], llm.tokenizer, options.tool_call_parser)
        self.answer_realm = set_answer_realm(
            llm.session,
            llm.input_processor,
            self.names[0],
            sorted(self.defaults.items()),
            options.tool_call_parser,
        )
        self.error: Exception | None = None
        self.is_draining = False
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._calls: set[ApiCall] = set()  # that the engine's thread works on
        self._num_calls = 0  # under way
        self._tokenizing = Counter[str]()  # completions being tokenized, by client
        self._fair_queue, self.admission = FairQueue(), Admission(options)
        self.max_model_len = llm.engine.sizes.max_model_len
        self.lag = EventLoopLag(self._loop)
        self._ping_timer = self._loop.call_later(options.keepalive_interval, self._ping)
        self._driver = make_driver(llm.session, on_failure=self._report_failure)
        self._preparer = TaskPreparer(llm, self.replies)

    def require_model(self, name: str) -> str:
        """Return `name` if the model or an adapter is served under it. Raises HttpError otherwise."""
        if name not in self.names and name not in self.adapters:
            raise HttpError(404, f"model {name!r} is not served here", "model_not_found", "model")
        return name

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """Adapters by the names that requests may give; the names of the model itself take precedence."""
        registry = self.llm.input_processor.adapter_registry
        requests = [] if registry is None else registry.requests
        return {request.lora_name: request for request in requests if request.lora_name not in self.names}

    def require_adapter_registry(self):
        """Return the registry of adapters. Raises HttpError if none are served."""
        if (registry := self.llm.input_processor.adapter_registry) is None:
            raise HttpError(400, "no adapters are served: set enable_lora")
        return registry

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def open_call(
        self, tasks: Sequence[Task], client_body: ClientBody, is_admitted: bool = False
    ) -> AsyncIterator[ApiCall]:
        """Submit tasks, yield their call, and drop it when the block ends.

        is_admitted: whether the tasks belong to a request that has already been admitted

        Raises HttpError if there is no room for a request that is not admitted, RequestError for a wrong
        task, ClientLeft if the client leaves while prompts are tokenized or grammars compiled.
        """
        tasks = self._isolate_cache_salts(tasks, client_body.client)
        mailbox = Mailbox(self._driver.wake, max_unread_tokens=self.options.max_stream_backlog)
        call = ApiCall(tasks[0].model or self.names[0], tasks, client_body.client, mailbox)
        try:
            count = sum(task.params.n for task in tasks)
            with self.count_call(), self._reserve_room(count, client_body.client, is_admitted):
                prepare = self._preparer.prepare_subscriptions
                subscriptions = await prepare(tasks, self.adapters, client_body)
                self._check_available(is_admitted)
                self._begin_call(call, subscriptions, client_body)
            with self.count_call():
                yield call
        finally:
            self._drop_call(call)

    def _isolate_cache_salts(self, tasks: Sequence[Task], client: str) -> Sequence[Task]:
        """Return a client's tasks with the cache salts that the isolation of clients requires."""
        isolation = self.options.prefix_cache_isolation
        salts = [client_salt(isolation, client, task.cache_salt) for task in tasks]
        return [replace(task, cache_salt=salt) for task, salt in zip(tasks, salts, strict=True)]

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Count a request that the shutdown waits for."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._end_if_done()

    def call_realm(self, call: ApiCall) -> str:
        """Return the realm of a call's answer: a hash of the weights and settings that decide its tokens."""
        return self.answer_realm.name_with_adapter(call.subscriptions[0].adapter)

    async def answer_call(self, call: ApiCall, write: Callable[[list[RequestOutput]], T]) -> T:
        """Wait for the results of a call, and return the answer that `write` makes of them. `write` runs in a
        thread for answers, since an answer may have a million numbers."""
        await call.wait_end()
        cost = 1 + sum(request.num_output_tokens for request in call.requests)
        return await self.admission.answer_pool.run(call.client, cost, lambda: write(call.make_results()))

    @contextmanager
    def _reserve_room(self, count: int, client: str, is_admitted: bool) -> Iterator[None]:
        """Reserve room for `count` completions of a client while they are tokenized. Raises HttpError if more
        than `max_queued` would wait and the client would exceed its share of them."""
        self._check_available(is_admitted)
        waiting = self._count_waiting()
        if count > self.options.max_queued:
            raise HttpError(
                400, f"n and the prompts make {count} completions; {self.options.max_queued} may wait"
            )
        share = self.options.max_queued // len({*waiting, client})
        is_full = waiting.total() + count > self.options.max_queued
        if is_full and waiting[client] + count > share and not is_admitted:
            raise HttpError(429, f"{waiting.total()} completions wait already", "too_many_requests")
        self._tokenizing[client] += count
        try:
            yield
        finally:
            self._tokenizing -= Counter({client: count})

    def _count_waiting(self) -> Counter[str]:
        """Return the number of completions without a first token, by client."""
        waiting = self._tokenizing.copy()
        for call in self._calls:
            if count := call.num_waiting:
                waiting[call.client] += count
        return waiting

    def _check_available(self, is_admitted: bool) -> None:
        if self.error is not None or self._is_drain_blocked or (self.is_draining and not is_admitted):
            raise HttpError(503, "the server is ending", "unavailable")

    def _begin_call(
        self, call: ApiCall, subscriptions: Sequence[Subscription], client_body: ClientBody
    ) -> None:
        for task, subscription in zip(call.tasks, subscriptions, strict=True):
            prompt_tokens = len(subscription.prompt_ids)
            call.add(subscription, self._assign_position(client_body.client, task, prompt_tokens))
        self._calls.add(call)
        call.deadline_timer = self._loop.call_at(
            client_body.deadline, self._on_deadline, call, client_body.timeout_error()
        )
        for subscription in call.mailbox.unfinished:
            self._driver.submit(subscription, call.mailbox)

    def _assign_position(self, client: str, task: Task, prompt_tokens: int) -> int:
        """Return the position of a task in the fair queue, by its prompt tokens and the tokens that it may
        generate. Without a client all tasks have position 0: first come, first served."""
        if not client:
            return 0
        for call in self._calls:
            self._note_served(call)
        room = self.max_model_len - prompt_tokens
        max_generated = task.params.n * min(task.params.max_tokens or room, room)
        return self._fair_queue.assign_position(client, prompt_tokens + max_generated)

    async def change_engine(self, work: Callable[[], Any]) -> Any:
        """Call `work`, which changes the engine, in another thread. Then wake the driver."""
        try:
            return await asyncio.to_thread(work)
        finally:
            self._driver.wake()
            self._fail_if_drain_blocked()

    def _note_served(self, call: ApiCall) -> None:
        """Advance the fair queue to a call's prompts that have a first token."""
        for subscription in call.subscriptions:
            if subscription.has_begun:
                self._fair_queue.on_served(subscription.requests[0].priority)

    def _ping(self) -> None:
        """Wake the readers of calls without outputs since the last ping."""
        for call in self._calls:
            call.mailbox.ping()
        self._ping_timer = self._loop.call_later(self.options.keepalive_interval, self._ping)

    def _on_deadline(self, call: ApiCall, error: HttpError) -> None:
        if call.num_waiting:
            self._drop_call(call)
            call.mailbox.fail(error)

    def _drop_call(self, call: ApiCall) -> None:
        """End what is unfinished of a call."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._note_served(call)
        if call.deadline_timer is not None:
            call.deadline_timer.cancel()
        for subscription in call.mailbox.unfinished:
            self._driver.drop(subscription)

    # ------------------------------------------------------------ the end

    def start_draining(self) -> None:
        """Take no more requests. `ended` is set when the running requests are done. If the engine is paused,
        its requests end with an error: a router resumes them on another replica."""
        self.is_draining = True
        self._fail_if_drain_blocked()
        self._end_if_done()

    @property
    def _is_drain_blocked(self) -> bool:
        return self.is_draining and self.llm.is_sleeping()

    def _fail_if_drain_blocked(self) -> None:
        if not self._is_drain_blocked:
            return
        self._fail_calls(HttpError(503, "the server is ending, and it is paused", "unavailable"))

    def _end_if_done(self) -> None:
        if self.is_draining and not self._num_calls:
            self.ended.set()

    def _report_failure(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._on_failure, error)

    def _on_failure(self, error: Exception) -> None:
        self.error = error
        traceback.print_exception(error)
        self._fail_calls(HttpError(500, "the engine has failed", "engine_error"))
        self.ended.set()

    def _fail_calls(self, error: HttpError) -> None:
        """Fail all calls that have not ended."""
        for call in [call for call in self._calls if call.mailbox.unfinished]:
            self._drop_call(call)
            call.mailbox.fail(error)

    async def close(self) -> None:
        self._ping_timer.cancel()
        self.lag.close()
        self.admission.close()
        await asyncio.to_thread(self._driver.stop)
