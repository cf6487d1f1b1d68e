"""A thread that steps an engine. Requests go in through a queue of orders. After each step, one call delivers
the new outputs of all requests."""

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
from ..host.streams import warn_once
from ..host.threads import OrderQueue, run_in_thread_or_undo, run_orders
from ..text.outputs import CompletionOutput, GenerationError, RequestOutput
from .input_processor import InputProcessor, PromptInput
from .request_group import RequestGroup, StreamCursor
from .session import Session
from .tasks.embedding import embedding_of


@dataclass(eq=False)
class DrivenRequest:
    """A request in a driver.

    take: returns its new outputs, or []; called after each step
    put: receives each StreamChunk, or the engine's error
    """

    group: RequestGroup
    take: Callable[[], list[Any]]
    put: Callable[[Any], Any]


class StreamChunk(NamedTuple):
    """New outputs of one request after a step.

    handle: the request, as it was given to the driver
    outputs: what its `take` returned
    is_last: whether these are its last outputs
    error: the error that ended it, if any
    """

    handle: Any
    outputs: list[Any]
    is_last: bool
    error: Exception | None = None


def deliver_chunks(chunks: Sequence[StreamChunk]) -> list[Any]:
    """Pass each request its chunk or its error. Returns the requests whose `put` failed."""
    failed = []
    for chunk in chunks:
        try:
            chunk.handle.put(chunk.error or chunk)
        except Exception as error:  # noqa: BLE001 - it must not reach the other requests
            warn_once(f"request {chunk.handle.group.id} is dropped, its reader failed: {error!r}")
            failed.append(chunk.handle)
    return failed


def fail_requests(error: Exception, handles: Sequence[DrivenRequest]) -> None:
    deliver_chunks([StreamChunk(handle, [], True, error) for handle in handles])


class StreamReader:
    """A request in a driver whose outputs are read in an event loop.

    Outputs are built when the reader waits for them. Outputs of several steps are then merged into one, so a
    reader that stalls holds none.

    take: returns the outputs since its last call; called in the driver's thread until the request has ended,
        then in the reader's
    """

    def __init__(self, group: RequestGroup, take: Callable[[], list[Any]]):
        self.group, self._take = group, take
        self._is_waiting = self.is_at_end = False
        self._loop, self._chunks = asyncio.get_running_loop(), asyncio.Queue[StreamChunk | Exception]()

    def take(self) -> list[Any]:
        """Return the new outputs if the reader waits for them, else []."""
        news = self._take() if self._is_waiting else []
        if news:
            self._is_waiting = False
        return news

    def put(self, news: StreamChunk | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: no coroutine is left that could read it
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, news)

    async def wait_outputs(self, wake: Callable[[], None]) -> list[Any]:
        """Wait for new outputs and return them. `wake` makes the driver's thread look for some. Raises the
        engine's errors, after the tokens of the steps before."""
        if self._chunks.empty():
            self._is_waiting = True
            wake()
        news = await self._chunks.get()
        if isinstance(news, Exception):
            if pieces := self._take():  # tokens of steps before the error
                self.put(news)
                return pieces
            raise news
        self.is_at_end = news.is_last
        return self._take() if news.is_last and not news.outputs else news.outputs


class Driver:
    """Steps a session's engine in a thread of its own. Only `stop` and `pause` wait.

    deliver: called in the thread with the chunks of each step; returns requests to drop, whose readers failed
    on_failure: called in the thread with an error of the engine and the running requests, which are dropped
    on_pause: called in the thread if there are running requests and the engine may not step
    start_thread: starts the thread and returns it

    The thread keeps no idle driver alive. It ends once the driver is garbage collected.
    """

    def __init__(
        self,
        session: Session,
        deliver: Callable[[Sequence[StreamChunk]], Sequence[Any] | None] = deliver_chunks,
        on_failure: Callable[[Exception, Sequence[Any]], None] = fail_requests,
        on_pause: Callable[[], None] = lambda: None,
        start_thread: "Callable[[weakref.ref[Driver], OrderQueue], DriverThread] | None" = None,
    ):
        self._session, self._deliver = session, deliver
        self._on_failure, self._on_pause = on_failure, on_pause
        self._handles: dict[str, Any] = {}
        self._orders = OrderQueue()
        session.drivers.add(self)
        self._is_stopped, self.is_open = False, True
        weakref.finalize(self, self._orders.put, None)
        self._thread = (start_thread or start_engine_thread)(weakref.ref(self), self._orders)

    def call_in_thread(self, work: Callable[[], Any]) -> None:
        """Run `work` in the driver's thread before the next step. If the driver has stopped, run it here."""
        self._orders.put(work)
        if self._is_stopped:
            run_orders(self._orders, wait=False)

    def add_request(self, handle: Any) -> None:
        self.call_in_thread(lambda: self._add_request(handle))

    def drop_request(self, handle: Any) -> None:
        """Abort and drop a request before the next step."""
        self.call_in_thread(lambda: self._drop_request(handle))

    def wake(self) -> None:
        """Make the thread look for work: the engine was paused or resumed, or requests have ended."""
        self.call_in_thread(lambda: None)

    def pause(self) -> None:
        """Take no steps until `resume`. Waits for the running step."""
        self.is_open = False
        with self._session.hold_engine():
            pass

    def resume(self) -> None:
        self.is_open = True
        self.wake()

    def stop(self) -> None:
        """End the thread after the running step, and wait for it."""
        self._orders.put(None)
        self._thread.join()
        self._is_stopped = True
        run_orders(self._orders, wait=False)

    async def stream(
        self,
        make_group: Callable[[], RequestGroup],
        make_take: Callable[[RequestGroup], Callable[[], list[Any]]],
    ) -> AsyncGenerator[Any]:
        """Run a group, and yield its outputs in an event loop. Outputs of several steps come at once if the
        caller is slower than the steps. Closing or cancelling the generator aborts the group.

        make_group: makes the group; called in another thread
        make_take: returns the function that takes the group's new outputs

        Raises the errors of `make_group`, of `make_take` and of the engine.
        """
        group = await run_in_thread_or_undo(make_group, lambda group: self._session.drop_groups([group]))
        reader = StreamReader(group, make_take(group))
        self.add_request(reader)
        try:
            while not reader.is_at_end:
                for piece in await reader.wait_outputs(self.wake):
                    yield piece
        finally:
            if not reader.is_at_end:
                self.drop_request(reader)
                await asyncio.to_thread(self._session.drop_groups, [group])

    # ------------------------------------------------------------ in the thread

    def _add_request(self, handle: Any) -> None:
        with self._session.hold_engine():
            # else it was dropped meanwhile
            is_kept = self._session.groups.get(handle.group.id) is handle.group
            if is_kept or self._session.is_closed:  # the next step fails those of a closed session
                self._handles[handle.group.id] = handle
            if is_kept:
                self._session.submit_groups([handle.group])

    def _drop_request(self, handle: Any) -> None:
        if self._handles.get(handle.group.id) is handle:  # the id of one that has ended may be another's now
            del self._handles[handle.group.id]
        self._session.drop_groups([handle.group])

    def step_and_deliver(self) -> bool:
        """Take one step, and deliver the new outputs. Returns whether there is more work."""
        with self._session.hold_engine():
            engine = self._session.engine
            can_step = self.is_open and not (engine.is_sleeping or engine.sleep_state.discarded)
            if can_step:
                self._session.step_engine()
            news = map(take_chunk, self._handles.values())
            chunks = [chunk for chunk in news if chunk.outputs or chunk.is_last]
            for handle in [chunk.handle for chunk in chunks if chunk.is_last]:
                self._drop_request(handle)
            for handle in (self._deliver(chunks) or ()) if chunks else ():
                self._drop_request(handle)
            is_busy = bool(self._handles or engine.has_work)
        if not can_step and self._handles:
            self._on_pause()
        return can_step and is_busy

    def fail_requests(self, error: Exception) -> None:
        handles, self._handles = list(self._handles.values()), {}
        self._on_failure(error, handles)
        self._session.drop_groups([handle.group for handle in handles])


def take_chunk(handle: Any) -> StreamChunk:
    """Return the new outputs of a request. An error of its `take` ends the request."""
    try:
        return StreamChunk(handle, handle.take(), handle.group.is_finished)
    except Exception as error:  # noqa: BLE001 - it must not reach the other requests
        return StreamChunk(handle, [], True, error)


class DriverThread(Protocol):
    """Thread that runs a driver's orders and steps."""

    def join(self) -> None: ...


def start_engine_thread(driver_ref: "weakref.ref[Driver]", orders: OrderQueue) -> DriverThread:
    """Start the thread of a driver. The thread holds a weak reference to the driver."""

    def drive() -> None:
        is_busy: bool | None = False
        while is_busy is not None:
            is_busy = run_orders_and_step(driver_ref, orders, wait=not is_busy)

    thread = threading.Thread(target=drive, name="duetto-engine", daemon=True)
    thread.start()
    return thread


def run_orders_and_step(driver_ref: "weakref.ref[Driver]", orders: OrderQueue, wait: bool) -> bool | None:
    """Run a driver's orders and a step. With `wait`, wait for the first order. Returns whether there is more
    work; None if the driver has ended. Between calls the thread keeps neither driver nor engine alive."""
    try:
        if not run_orders(orders, wait) or (driver := driver_ref()) is None:
            return None
        return driver.step_and_deliver()
    except Exception as error:  # noqa: BLE001 - callers wait for answers, whatever it is
        if (driver := driver_ref()) is not None:
            driver.fail_requests(error)
        return False


class StreamHandle:
    """A request for a driver, to generate or to embed. `take` returns CompletionOutputs.

    known: token ids that each completion has already; as an attribute, their outputs

    Raises ValueError or TypeError that names the wrong argument.
    """

    def __init__(
        self,
        session: Session,
        processor: InputProcessor,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams,
        known: Sequence[Sequence[int]] = (),
        adapter: LoRARequest | None = None,
    ):
        make_group = partial(
            processor.make_group, prompt=prompt, params=params, known=known, lora_request=adapter
        )
        (self.group,) = session.make_groups([make_group])
        self._processor, self._cursor = processor, StreamCursor(self.group)
        self._delivered = Counter[int]()  # tokens of each completion
        self.known = self.take()

    @property
    def is_at_end(self) -> bool:
        return self._cursor.is_at_end

    @property
    def prompt(self) -> list[int]:
        return self.group.requests[0].prompt

    def set_priority(self, priority: int, source: str | None = None) -> None:
        """Set the priority (smaller goes first) and `source`, the address of the prefill engine for its
        prompt. Call it before `Driver.add_request`."""
        for request in self.group.requests:
            request.priority, request.prefill_address = priority, source

    @property
    def adapter(self) -> Adapter | None:
        return self.group.requests[0].adapter

    @property
    def cached_tokens(self) -> int:
        return self.group.requests[0].num_cached_tokens

    @property
    def embedding(self) -> np.ndarray:
        """Embedding of the prompt, float32 [D], once the request has ended."""
        return embedding_of(self.group)

    def make_output(self) -> RequestOutput:
        """Return the request's output so far."""
        return self._processor.make_output(self.group)

    def take(self) -> list[CompletionOutput]:
        """Return the new text, tokens and log-probabilities of each completion. The last output of a
        completion has its finish reason. Raises GenerationError if the model computed NaN."""
        outputs = []
        for delta in self._cursor.take():
            if self.group.requests[delta.index].has_failed:
                raise GenerationError(self.group.requests[delta.index].stop_reason)
            request, start = self.group.requests[delta.index], self._delivered[delta.index]
            outputs.append(self._processor.make_delta_output(delta, request, start))
            self._delivered[delta.index] += len(delta.token_ids)
        return outputs
