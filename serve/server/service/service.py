"""State shared by all requests of a server: the engine's driver, limits, and the shutdown."""

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from ....lora.request import LoRARequest
from ...llm.driver import Driver, StreamChunk, StreamHandle
from ...llm.llm import LLM
from ...llm.weights import realms_of
from ...options.server import ServerOptions
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, RequestOutput
from .errors import HttpError
from .exposition import EventLoopLag
from .fair_queue import FairQueue
from .preparing import TaskPreparer
from .streams import OutputStream


@dataclass(frozen=True)
class ApiCall:
    """A client's request to a model. Each of its `tasks` has a flow; `stream` gets the pieces of all
    flows."""

    model: str
    tasks: Sequence[Task]
    flows: list[StreamHandle]
    stream: OutputStream

    @property
    def resumed(self) -> list[CompletionOutput]:
        """Outputs that its completions had on another server."""
        return [output for flow in self.flows for output in flow.known]

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, and those of them that were found in the cache."""
        return {
            "prompt_tokens": sum(len(flow.prompt) for flow in self.flows),
            "cached_tokens": sum(flow.cached_tokens for flow in self.flows),
        }


@dataclass
class ActiveStream:
    """A running flow.

    stream: gets its pieces
    base: index of its first choice in the stream
    choices: number of its completions
    line: position in the fair queue
    late: timer until its first piece
    """

    stream: OutputStream
    base: int
    choices: int
    line: int
    late: asyncio.TimerHandle | None


class Service:
    """Serves an LLM. Made in the event loop, and used only there. `defaults` are sampling parameters for
    requests that give none; `driver` makes the engine's. `ended` is set once the engine has failed, or once
    `drain` was called and all requests are done."""

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions,
        defaults: Mapping[str, Any],
        driver: Callable[..., Driver] = Driver,
    ):
        self.llm, self.options = llm, options
        self.names = list(options.served_model_name or ["demo"])
        self.defaults = dict(defaults)
        self.replies = Replies(self.names[0], llm.tokenizer, options.tool_call_parser)
        self.realms = realms_of(
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
        self._places: dict[StreamHandle, ActiveStream] = {}
        self._coming = self._calls = 0  # completions being tokenized, calls under way
        self._shares = FairQueue()
        self.max_model_len = llm.engine.sizes.max_model_len
        self.lag = EventLoopLag(self._loop)
        self._pinging = self._loop.call_later(options.keepalive_interval, self._ping)
        self._driver = driver(llm.session, self._deliver, self._fail)
        self._preparing = TaskPreparer(llm, self._driver, self.replies)

    def require_model(self, name: str) -> str:
        """Return a name that the model or an adapter is served under. Raises HttpError for others."""
        if name not in self.names and name not in self.adapters:
            raise HttpError(404, f"model {name!r} is not served here", "model_not_found", "model")
        return name

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """Adapters by the names that requests may give; the names of the model itself take precedence."""
        registry = self.llm.input_processor.adapters
        found = [] if registry is None else registry.requests
        return {own.lora_name: own for own in found if own.lora_name not in self.names}

    def require_adapters(self):
        """Return the registry of adapters. Raises HttpError if none are served."""
        if (registry := self.llm.input_processor.adapters) is None:
            raise HttpError(400, "no adapters are served: set enable_lora")
        return registry

    # ------------------------------------------------------------ requests

    @asynccontextmanager
    async def call(
        self, tasks: Sequence[Task], client: str, is_admitted: bool = False, receive: Receive | None = None
    ) -> AsyncIterator[ApiCall]:
        """Run tasks until the block ends. Raises HttpError if there is no room, unless the tasks belong to an
        admitted request; RequestError for what is not allowed; ClientLeft if `receive` reports a disconnect
        while grammars are compiled."""
        flows: list[StreamHandle] = []
        end = self._loop.time() + self.options.queue_timeout
        stream = OutputStream(lambda: self._leave(flows), self.options.max_stream_backlog)
        try:
            with self.under_way(), self._room(sum(task.params.n for task in tasks), is_admitted):
                prepared = await self._prepared(tasks, is_admitted, end, receive)
                for task, flow in zip(tasks, prepared, strict=True):
                    self._begin(flow, task, client, stream, end)
                    flows.append(flow)
            with self.under_way():
                yield ApiCall(tasks[0].model or self.names[0], tasks, flows, stream)
        finally:
            self._leave(flows)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count a request that the shutdown waits for."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._end_if_done()

    def realm(self, call: ApiCall) -> str:
        """Return the realm of a call: its tokens follow from these weights and settings."""
        return self.realms.of(call.flows[0].adapter)

    async def outputs(self, call: ApiCall) -> list[RequestOutput]:
        """Wait for the results of a call."""
        await call.stream.ended()
        return await asyncio.to_thread(self.results, call)

    def results(self, call: ApiCall) -> list[RequestOutput]:
        return [flow.output() for flow in call.flows]

    @contextmanager
    def _room(self, count: int, is_admitted: bool) -> Iterator[None]:
        """Reserve room for `count` completions while they are tokenized."""
        self._check(is_admitted)
        waiting = self._coming + sum(place.choices for place in self._places.values() if place.late)
        if count > self.options.max_queued:
            raise HttpError(
                400, f"n and the prompts make {count} completions; {self.options.max_queued} may wait"
            )
        if waiting + count > self.options.max_queued and not is_admitted:
            raise HttpError(429, f"{waiting} completions wait already", "too_many_requests")
        self._coming += count
        try:
            yield
        finally:
            self._coming -= count

    def _check(self, is_admitted: bool) -> None:
        if self.error is not None or self._is_stuck or (self.is_draining and not is_admitted):
            raise HttpError(503, "the server is ending", "unavailable")

    async def _prepared(
        self, tasks: Sequence[Task], is_admitted: bool, end: float, receive: Receive | None
    ) -> list[StreamHandle]:
        """Return the flows of tasks, or raise HttpError at the time `end`."""
        try:
            async with asyncio.timeout_at(end):
                flows = await self._preparing.flows(tasks, self.adapters, receive)
        except TimeoutError:
            raise self._too_late() from None
        try:
            self._check(is_admitted)
        except HttpError:
            self._preparing.leave(flows)
            raise
        return flows

    def _begin(self, flow: StreamHandle, task: Task, client: str, stream: OutputStream, end: float) -> None:
        place, n = self._position(client, task, len(flow.prompt)), task.params.n
        flow.rank(place, task.source)
        late = self._loop.call_at(end, self._late, flow)
        self._places[flow] = ActiveStream(stream, stream.choices, n, place, late)
        for output in flow.known:
            output.index += stream.choices
        stream.count += 1
        stream.choices += n
        if task.known and flow.at_end:  # nothing is left to generate
            self._hand_out([StreamChunk(flow, [], True)])
            return self._driver.leave(flow)
        self._driver.begin(flow)

    def _position(self, client: str, task: Task, prompt_tokens: int) -> int:
        """Return the position in the fair queue, by the tokens that may be generated. All clients without a
        key are one, first come, first served."""
        if not client:
            return 0
        room = self.max_model_len - prompt_tokens
        most = task.params.n * min(task.params.max_tokens or room, room)
        return self._shares.place(client, prompt_tokens + most)

    async def change(self, work: Callable[[], Any]) -> Any:
        """Change the engine in another thread, and wake its own thread."""
        try:
            return await asyncio.to_thread(work)
        finally:
            self._driver.wake()
            self._end_paused()

    # ------------------------------------------------------------ pieces, from the engine's thread

    def _deliver(self, pieces: Sequence[StreamChunk]) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, pieces)

    def _hand_out(self, pieces: Sequence[StreamChunk]) -> None:
        for flow, outputs, at_end, error in pieces:
            if (place := self._places.get(flow)) is None:
                continue  # its client has left
            if place.late is not None:
                place.late.cancel()
                place.late = None
                self._shares.served(place.line)
            for output in outputs:
                output.index += place.base
            if error is None:
                place.stream.put(outputs, at_end)
            else:
                traceback.print_exception(error)
                place.stream.fail(HttpError(500, "the request has failed", "engine_error"))
            if at_end:
                self._places.pop(flow, None)

    def _ping(self) -> None:
        """Wake the readers of streams without pieces since the last ping."""
        for place in self._places.values():
            if place.stream.is_silent:
                place.stream.wake()
            place.stream.is_silent = True
        self._pinging = self._loop.call_later(self.options.keepalive_interval, self._ping)

    def _late(self, flow: StreamHandle) -> None:
        if (place := self._places.pop(flow, None)) is None:
            return
        self._driver.leave(flow)
        place.stream.fail(self._too_late())

    def _too_late(self) -> HttpError:
        seconds = f"{self.options.queue_timeout:g} s"
        return HttpError(503, f"nothing was generated within {seconds}", "max_wait")

    def _leave(self, flows: Sequence[StreamHandle]) -> None:
        for flow in flows:
            if (place := self._places.pop(flow, None)) is not None:
                self._driver.leave(flow)
                if place.late is not None:
                    place.late.cancel()

    # ------------------------------------------------------------ the end

    def drain(self) -> None:
        """Take no more requests; `ended` is set when those under way are done. Requests of a paused engine,
        which takes no steps, end with an error: a router resumes them on another replica."""
        self.is_draining = True
        self._end_paused()
        self._end_if_done()

    @property
    def _is_stuck(self) -> bool:
        return self.is_draining and self.llm.is_sleeping()

    def _end_paused(self) -> None:
        if not self._is_stuck:
            return
        for flow in self._fail_all(HttpError(503, "the server is ending, and it is paused", "unavailable")):
            self._driver.leave(flow)

    def _end_if_done(self) -> None:
        if self.is_draining and not self._calls:
            self.ended.set()

    def _fail(self, error: Exception, flows: Sequence[StreamHandle]) -> None:
        self._loop.call_soon_threadsafe(self._failed, error)

    def _failed(self, error: Exception) -> None:
        self.error = error
        traceback.print_exception(error)
        self._fail_all(HttpError(500, "the engine has failed", "engine_error"))
        self.ended.set()

    def _fail_all(self, error: HttpError) -> list[StreamHandle]:
        """Fail all running flows, and return them."""
        failed, self._places = self._places, {}
        for place in failed.values():
            if place.late is not None:
                place.late.cancel()
            place.stream.fail(error)
        return list(failed)

    async def close(self) -> None:
        self._pinging.cancel()
        self.lag.close()
        await asyncio.to_thread(self._driver.stop)
