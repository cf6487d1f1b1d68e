"""State shared by all requests of a server: the engine's driver, limits and the shutdown."""

import asyncio
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ....lora.request import LoRARequest
from ...llm.driver import Driver, StreamChunk, StreamHandle
from ...llm.llm import LLM
from ...llm.weights import set_answer_realm
from ...options.server import ServerOptions
from ...text.cache_salt import client_salt
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, GenerationError, RequestOutput
from .admission import Admission, ClientBody
from .errors import HttpError
from .exposition import EventLoopLag
from .fair_queue import FairQueue
from .streams import OutputStream
from .task_preparer import TaskPreparer

T = TypeVar("T")


@dataclass(frozen=True)
class ApiCall:
    """A client's running request to a model.

    model: name that it gave
    tasks: one for each prompt
    handles: request in the driver, one for each task
    stream: receives the outputs of all handles
    """

    model: str
    tasks: Sequence[Task]
    handles: list[StreamHandle]
    stream: OutputStream

    @property
    def resumed_outputs(self) -> list[CompletionOutput]:
        """Outputs of the tokens that its completions already had from another server."""
        return [output for handle in self.handles for output in handle.known]

    @property
    def usage(self) -> dict[str, int]:
        """Number of prompt tokens, and of prompt tokens that were cached."""
        return {
            "prompt_tokens": sum(len(handle.prompt) for handle in self.handles),
            "cached_tokens": sum(handle.cached_tokens for handle in self.handles),
        }


@dataclass
class ActiveStream:
    """Bookkeeping of a running request of the driver (a `StreamHandle`).

    client: name of the API key that sent it, "" without keys
    stream: receives its outputs
    first_choice: index of its first choice in the stream
    num_choices: number of its completions
    position: position in the fair queue
    deadline_timer: timer of the deadline; None once an output has arrived
    """

    client: str
    stream: OutputStream
    first_choice: int
    num_choices: int
    position: int
    deadline_timer: asyncio.TimerHandle | None


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
        self._active: dict[StreamHandle, ActiveStream] = {}
        self._num_calls = 0  # under way
        self._tokenizing = Counter[str]()  # completions being tokenized, by client
        self._fair_queue, self.admission = FairQueue(), Admission(options)
        self.max_model_len = llm.engine.sizes.max_model_len
        self.lag = EventLoopLag(self._loop)
        self._ping_timer = self._loop.call_later(options.keepalive_interval, self._ping)
        self._driver = make_driver(llm.session, self._deliver, self._report_failure)
        self._preparer = TaskPreparer(llm, self._driver, self.replies)

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
        tasks, handles = self._isolate_cache_salts(tasks, client_body.client), list[StreamHandle]()
        stream = OutputStream(lambda: self._drop_handles(handles), self.options.max_stream_backlog)
        try:
            count = sum(task.params.n for task in tasks)
            with self.count_call(), self._reserve_room(count, client_body.client, is_admitted):
                prepared = await self._prepare_tasks(tasks, is_admitted, client_body)
                for task, handle in zip(tasks, prepared, strict=True):
                    self._begin_stream(handle, task, stream, client_body)
                    handles.append(handle)
            with self.count_call():
                yield ApiCall(tasks[0].model or self.names[0], tasks, handles, stream)
        finally:
            self._drop_handles(handles)

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
        return self.answer_realm.name_with_adapter(call.handles[0].adapter)

    async def answer_call(self, call: ApiCall, client: str, write: Callable[[list[RequestOutput]], T]) -> T:
        """Wait for the results of a call, and return the answer that `write` makes of them. `write` runs in a
        thread for answers, since an answer may have a million numbers."""
        await call.stream.wait_end()
        tokens = 1 + sum(
            len(request.output_tokens) for handle in call.handles for request in handle.group.requests
        )
        return await self.admission.answer_pool.run(client, tokens, lambda: write(self.call_results(call)))

    def call_results(self, call: ApiCall) -> list[RequestOutput]:
        return [handle.make_output() for handle in call.handles]

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
        for active in self._active.values():
            if active.deadline_timer:
                waiting[active.client] += active.num_choices
        return waiting

    def _check_available(self, is_admitted: bool) -> None:
        if self.error is not None or self._is_drain_blocked or (self.is_draining and not is_admitted):
            raise HttpError(503, "the server is ending", "unavailable")

    async def _prepare_tasks(
        self, tasks: Sequence[Task], is_admitted: bool, client_body: ClientBody
    ) -> list[StreamHandle]:
        handles = await self._preparer.prepare_handles(tasks, self.adapters, client_body)
        try:
            self._check_available(is_admitted)
        except HttpError:
            self._preparer.drop_handles(handles)
            raise
        return handles

    def _begin_stream(
        self, handle: StreamHandle, task: Task, stream: OutputStream, client_body: ClientBody
    ) -> None:
        position, n = self._assign_position(client_body.client, task, len(handle.prompt)), task.params.n
        handle.set_priority(position, task.prefill_address)
        deadline_timer = self._loop.call_at(
            client_body.deadline, self._on_timeout, handle, client_body.timeout_error()
        )
        self._active[handle] = ActiveStream(
            client_body.client, stream, stream.num_choices, n, position, deadline_timer
        )
        for output in handle.known:
            output.index += stream.num_choices
        stream.num_unfinished += 1
        stream.num_choices += n
        if task.resumed_outputs and handle.is_at_end:  # nothing is left to generate
            self._put_chunks([StreamChunk(handle, [], True)])
            return self._driver.drop_request(handle)
        self._driver.add_request(handle)

    def _assign_position(self, client: str, task: Task, prompt_tokens: int) -> int:
        """Return the position of a task in the fair queue, by its prompt tokens and the tokens that it may
        generate. Without a client all tasks have position 0: first come, first served."""
        if not client:
            return 0
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

    # ------------------------------------------------------------ pieces, from the engine's thread

    def _deliver(self, chunks: Sequence[StreamChunk]) -> None:
        self._loop.call_soon_threadsafe(self._put_chunks, chunks)

    def _put_chunks(self, chunks: Sequence[StreamChunk]) -> None:
        for handle, outputs, is_last, error in chunks:
            if (active := self._active.get(handle)) is None:
                continue  # its client has left
            if active.deadline_timer is not None:
                active.deadline_timer.cancel()
                active.deadline_timer = None
                self._fair_queue.on_served(active.position)
            for output in outputs:
                output.index += active.first_choice
            if error is None:
                active.stream.put(outputs, is_last)
            elif isinstance(error, GenerationError):
                active.stream.fail(HttpError(500, str(error), error.CODE))
            else:
                traceback.print_exception(error)
                active.stream.fail(HttpError(500, "the request has failed", "engine_error"))
            if is_last:
                self._active.pop(handle, None)

    def _ping(self) -> None:
        """Wake the readers of streams without outputs since the last ping."""
        for active in self._active.values():
            if active.stream.is_silent:
                active.stream.wake()
            active.stream.is_silent = True
        self._ping_timer = self._loop.call_later(self.options.keepalive_interval, self._ping)

    def _on_timeout(self, handle: StreamHandle, error: HttpError) -> None:
        if (active := self._active.pop(handle, None)) is None:
            return
        self._driver.drop_request(handle)
        active.stream.fail(error)

    def _drop_handles(self, handles: Sequence[StreamHandle]) -> None:
        for handle in handles:
            if (active := self._active.pop(handle, None)) is not None:
                self._driver.drop_request(handle)
                if active.deadline_timer is not None:
                    active.deadline_timer.cancel()

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
        for handle in self._fail_all(HttpError(503, "the server is ending, and it is paused", "unavailable")):
            self._driver.drop_request(handle)

    def _end_if_done(self) -> None:
        if self.is_draining and not self._num_calls:
            self.ended.set()

    def _report_failure(self, error: Exception, handles: Sequence[StreamHandle]) -> None:
        self._loop.call_soon_threadsafe(self._on_failure, error)

    def _on_failure(self, error: Exception) -> None:
        self.error = error
        traceback.print_exception(error)
        self._fail_all(HttpError(500, "the engine has failed", "engine_error"))
        self.ended.set()

    def _fail_all(self, error: HttpError) -> list[StreamHandle]:
        """Fail all running requests of the driver, and return their handles."""
        failed, self._active = self._active, {}
        for active in failed.values():
            if active.deadline_timer is not None:
                active.deadline_timer.cancel()
            active.stream.fail(error)
        return list(failed)

    async def close(self) -> None:
        self._ping_timer.cancel()
        self.lag.close()
        self.admission.close()
        await asyncio.to_thread(self._driver.stop)
