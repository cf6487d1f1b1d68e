"""A thread that steps an engine: requests go in through a queue of orders, and the news of all of them come
out in one call after each step."""

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest
from ...model.pooling import PoolingParams
from ...sampling.params import SamplingParams
from ..host.streams import warn
from ..host.threads import Orders, finished, obey
from ..text.outputs import CompletionOutput, RequestOutput
from .input_processor import InputProcessor, Prompt
from .request_group import RequestGroup, StreamCursor
from .session import Session
from .tasks.embedding import embedding_of


@dataclass(eq=False)
class DrivenRequest:
    """A request in a driver.

    take: returns its news, or nothing; called after each step.
    put: receives each StreamChunk with news, or the engine's error.
    """

    group: RequestGroup
    take: Callable[[], list[Any]]
    put: Callable[[Any], Any]


class StreamChunk(NamedTuple):
    """The news of one request after a step, whether they are its last, and the error that ended it."""

    flow: Any
    outputs: list[Any]
    at_end: bool
    error: Exception | None = None


def put_each(chunks: Sequence[StreamChunk]) -> list[Any]:
    """Pass each request its chunk or its error; return the requests whose `put` failed."""
    lost = []
    for chunk in chunks:
        try:
            chunk.flow.put(chunk.error or chunk)
        except Exception as error:  # noqa: BLE001 - it must not reach the other requests
            warn(f"request {chunk.flow.group.id} is dropped, its reader failed: {error!r}")
            lost.append(chunk.flow)
    return lost


def fail_each(error: Exception, flows: Sequence[DrivenRequest]) -> None:
    put_each([StreamChunk(flow, [], True, error) for flow in flows])


class StreamReader:
    """A request of an event loop, in a driver.

    Outputs are built when the reader asks for them: those of the steps in between are merged, so a reader
    that stalls holds none.

    take: returns the news since its last call. It is called in the driver's thread until the request has
    ended, then in the reader's.
    """

    def __init__(self, group: RequestGroup, take: Callable[[], list[Any]]):
        self.group, self._take = group, take
        self._is_asked = self.at_end = False
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Queue[StreamChunk | Exception]()

    def take(self) -> list[Any]:
        """Return the news if the reader has asked for them."""
        found = self._take() if self._is_asked else []
        if found:
            self._is_asked = False
        return found

    def put(self, news: StreamChunk | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: no coroutine is left that could read it
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    async def outputs(self, wake: Callable[[], None]) -> list[Any]:
        """Wait for news; `wake` lets the driver look for them. Raises the engine's errors."""
        if self._news.empty():
            self._is_asked = True
            wake()
        news = await self._news.get()
        if isinstance(news, Exception):
            if found := self._take():  # tokens of steps before the error
                self.put(news)
                return found
            raise news
        self.at_end = news.at_end
        return self._take() if news.at_end and not news.outputs else news.outputs


class Driver:
    """Steps a session's engine in a thread of its own. No method but `stop` and `pause` waits.

    deliver: called in the thread, after each step with news. It may return requests to drop: they cannot be
    reached.
    failed: called in the thread with an error of the engine, and the requests under way, which are dropped.
    paused: called in the thread if requests are under way and the engine may not step.
    start: returns the thread that drives it.

    An idle driver is not kept alive by its thread, which ends with it.
    """

    def __init__(
        self,
        session: Session,
        deliver: Callable[[Sequence[StreamChunk]], Sequence[Any] | None] = put_each,
        failed: Callable[[Exception, Sequence[Any]], None] = fail_each,
        paused: Callable[[], None] = lambda: None,
        start: "Callable[[weakref.ref[Driver], Orders], DrivingThread] | None" = None,
    ):
        self._session, self._deliver, self._failed, self._paused = session, deliver, failed, paused
        self._flows: dict[str, Any] = {}
        self._orders = Orders()
        session.drivers.add(self)
        self._is_stopped, self.is_open = False, True
        weakref.finalize(self, self._orders.put, None)
        self._thread = (start or in_thread)(weakref.ref(self), self._orders)

    def call(self, work: Callable[[], Any]) -> None:
        """Run `work` in the thread before the next step; in this one if the driver has stopped."""
        self._orders.put(work)
        if self._is_stopped:
            obey(self._orders, wait=False)

    def begin(self, flow: Any) -> None:
        self.call(lambda: self._begin(flow))

    def leave(self, flow: Any) -> None:
        """Drop a request before the next step."""
        self.call(lambda: self._leave(flow))

    def wake(self) -> None:
        """Look again for work: the engine was paused or resumed, or requests were ended."""
        self.call(lambda: None)

    def pause(self) -> None:
        """Take no steps until `resume`; waits for the step under way."""
        self.is_open = False
        with self._session.turn():
            pass

    def resume(self) -> None:
        self.is_open = True
        self.wake()

    def stop(self) -> None:
        """End the thread after the step under way."""
        self._orders.put(None)
        self._thread.join()
        self._is_stopped = True
        obey(self._orders, wait=False)

    async def stream(
        self, make: Callable[[], RequestGroup], take_of: Callable[[RequestGroup], Callable[[], list[Any]]]
    ) -> AsyncGenerator[Any]:
        """Generate, for an event loop, what `take_of` the group finds after a step; a caller that is slower
        than the steps gets the news of several at once. `make` makes the group in another thread. Closing or
        cancelling the generator aborts the group.

        Raises the errors of `make` and of `take_of`, and those of the engine.
        """
        group = await finished(make, lambda made: self._session.drop([made]))
        reader = StreamReader(group, take_of(group))
        self.begin(reader)
        try:
            while not reader.at_end:
                for piece in await reader.outputs(self.wake):
                    yield piece
        finally:
            if not reader.at_end:
                self.leave(reader)
                await asyncio.to_thread(self._session.drop, [group])

    # ------------------------------------------------------------ in the thread

    def _begin(self, flow: Any) -> None:
        with self._session.turn():
            is_kept = self._session.groups.get(flow.group.id) is flow.group  # else it was dropped meanwhile
            if is_kept or self._session.is_closed:  # the next step fails those of a closed session
                self._flows[flow.group.id] = flow
            if is_kept:
                self._session.submit([flow.group])

    def _leave(self, flow: Any) -> None:
        if self._flows.get(flow.group.id) is flow:  # the id of one that has ended may be another's now
            del self._flows[flow.group.id]
        self._session.drop([flow.group])

    def advance(self) -> bool:
        """Take one step and deliver; return whether there is more to do."""
        with self._session.turn():
            engine = self._session.engine
            can_step = self.is_open and not (engine.is_sleeping or engine.sleeper.discarded)
            if can_step:
                self._session.advance()
            news = map(chunk_of, self._flows.values())
            chunks = [chunk for chunk in news if chunk.outputs or chunk.at_end]
            for flow in [chunk.flow for chunk in chunks if chunk.at_end]:
                self._leave(flow)
            for flow in (self._deliver(chunks) or ()) if chunks else ():
                self._leave(flow)
            is_busy = bool(self._flows or engine.has_work)
        if not can_step and self._flows:
            self._paused()
        return can_step and is_busy

    def fail(self, error: Exception) -> None:
        flows, self._flows = list(self._flows.values()), {}
        self._failed(error, flows)
        self._session.drop([flow.group for flow in flows])


def chunk_of(flow: Any) -> StreamChunk:
    """Return the news of a request; an error of its `take` ends it."""
    try:
        return StreamChunk(flow, flow.take(), flow.group.finished)
    except Exception as error:  # noqa: BLE001 - it must not reach the other requests
        return StreamChunk(flow, [], True, error)


class DrivingThread(Protocol):
    """Thread that takes a driver's orders and steps."""

    def join(self) -> None: ...


def in_thread(alive: "weakref.ref[Driver]", orders: Orders) -> DrivingThread:
    """Start a driver's thread."""

    def drive() -> None:
        is_busy: bool | None = False
        while is_busy is not None:
            is_busy = turn(alive, orders, wait=not is_busy)

    thread = threading.Thread(target=drive, name="duetto-engine", daemon=True)
    thread.start()
    return thread


def turn(alive: "weakref.ref[Driver]", orders: Orders, wait: bool) -> bool | None:
    """Run a driver's orders, of which the first may have to come, and a step. Return whether there is more to
    do, None at the end. Between turns a thread keeps no driver, and so no engine."""
    try:
        if not obey(orders, wait) or (driver := alive()) is None:
            return None
        return driver.advance()
    except Exception as error:  # noqa: BLE001 - callers wait for answers, whatever it is
        if (driver := alive()) is not None:
            driver.fail(error)
        return False


class StreamHandle:
    """A request for a driver, to generate or to embed, whose news are outputs.

    known: outputs of the tokens that its completions had already.

    Raises ValueError or TypeError, naming what is wrong.
    """

    def __init__(
        self,
        session: Session,
        processor: InputProcessor,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        known: Sequence[Sequence[int]] = (),
        adapter: LoRARequest | None = None,
    ):
        make = partial(processor.group, prompt=prompt, params=params, known=known, lora_request=adapter)
        (self.group,) = session.groups_of([make])
        self._processor, self._cursor = processor, StreamCursor(self.group)
        self._delivered = Counter[int]()  # tokens of each completion
        self.known = self.take()

    @property
    def at_end(self) -> bool:
        return self._cursor.at_end

    @property
    def prompt(self) -> list[int]:
        return self.group.requests[0].prompt

    def rank(self, priority: int, source: str | None = None) -> None:
        """Set, before it begins, its priority (smaller ones go first), and the address of the prefill engine
        that computes its prompt."""
        for request in self.group.requests:
            request.priority, request.source = priority, source

    @property
    def adapter(self) -> Adapter | None:
        return self.group.requests[0].adapter

    @property
    def cached_tokens(self) -> int:
        return self.group.requests[0].cached

    @property
    def embedding(self) -> np.ndarray:
        """Float32 [D], of the prompt of a request that has ended."""
        return embedding_of(self.group)

    def output(self) -> RequestOutput:
        """Return the whole result so far."""
        return self._processor.output(self.group)

    def take(self) -> list[CompletionOutput]:
        """Return the new text, tokens and log-probabilities of each completion; its last has the reason of
        its end."""
        found = []
        for delta in self._cursor.take():
            request, start = self.group.requests[delta.index], self._delivered[delta.index]
            found.append(self._processor.since(delta, request, start))
            self._delivered[delta.index] += len(delta.token_ids)
        return found
