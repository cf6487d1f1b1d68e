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
from typing import Any, NamedTuple

import numpy as np

from ...checkpoints.adapters.adapter import Adapter
from ...lora.request import LoRARequest
from ...model.pooling import PoolingParams
from ...sampling.params import SamplingParams
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
    """The news of one request after a step, and whether they are its last."""

    flow: Any
    outputs: list[Any]
    at_end: bool


def put_each(chunks: Sequence[StreamChunk]) -> None:
    for chunk in chunks:
        chunk.flow.put(chunk)


def fail_each(error: Exception, flows: Sequence[DrivenRequest]) -> None:
    for flow in flows:
        flow.put(error)


class Driver:
    """Steps a session's engine in a thread of its own. No method but `stop` and `pause` waits.

    deliver: called in the thread, after each step with news.
    failed: called in the thread with an error of the engine, and the requests under way, which are dropped.
    paused: called in the thread if requests are under way and the engine may not step.

    An idle driver is not kept alive by its thread, which ends with it.
    """

    def __init__(
        self,
        session: Session,
        deliver: Callable[[Sequence[StreamChunk]], None] = put_each,
        failed: Callable[[Exception, Sequence[Any]], None] = fail_each,
        paused: Callable[[], None] = lambda: None,
    ):
        self._session, self._deliver, self._failed, self._paused = session, deliver, failed, paused
        self._flows: dict[str, Any] = {}
        self._orders = Orders()
        session.drivers.add(self)
        self._is_stopped, self.is_open = False, True
        weakref.finalize(self, self._orders.put, None)
        target = (weakref.ref(self), self._orders)
        self._thread = threading.Thread(target=drive, args=target, name="duetto-engine", daemon=True)
        self._thread.start()

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
        """Generate, for an event loop, what `take_of` the group finds after each step; `make` makes the group
        in another thread. Closing or cancelling the generator aborts the group.

        Raises the errors of `make`, and those of the engine.
        """
        group = await finished(make, lambda made: self._session.drop([made]))
        loop, news = asyncio.get_running_loop(), asyncio.Queue[StreamChunk | Exception]()

        def put(new: StreamChunk | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: no coroutine is left that could read it
                loop.call_soon_threadsafe(news.put_nowait, new)

        flow, at_end = DrivenRequest(group, take_of(group), put), False
        self.begin(flow)
        try:
            while not at_end:
                new = await news.get()
                if isinstance(new, Exception):
                    raise new
                at_end = new.at_end
                for piece in new.outputs:
                    yield piece
        finally:
            if not at_end:
                self.leave(flow)
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
            news = [(flow, flow.take()) for flow in self._flows.values()]
            chunks = [StreamChunk(flow, new, flow.group.finished) for flow, new in news if new]
            for chunk in chunks:
                if chunk.at_end:
                    self._leave(chunk.flow)
            if chunks:
                self._deliver(chunks)
            is_busy = bool(self._flows or engine.has_work)
        if not can_step and self._flows:
            self._paused()
        return can_step and is_busy

    def fail(self, error: Exception) -> None:
        flows, self._flows = list(self._flows.values()), {}
        self._failed(error, flows)
        self._session.drop([flow.group for flow in flows])


def drive(alive: "weakref.ref[Driver]", orders: Orders) -> None:
    """A driver's thread. After an error it waits for the next order."""
    wait = True
    while True:
        driver = None  # an idle thread keeps no driver, and so no engine
        try:
            if not obey(orders, wait) or (driver := alive()) is None:
                return
            wait = not driver.advance()
        except Exception as error:  # noqa: BLE001 - callers wait for answers, whatever it is
            wait = True
            if (driver := alive()) is not None:
                driver.fail(error)


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
