"""The requests of all callers in one engine: ids, exclusive turns, and the loops in which callers step it."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from ..engine.core.engine import Engine
from ..host.process import is_forked, require_not_forked
from ..host.signals import defer_interrupt
from ..runtime.equal_bits.warmup import Warmup
from ..text.outputs import CompletionOutput
from .audit.answer_realm import AnswerRealm
from .audit.log import AuditLog
from .progress_bar import Tqdm, show_progress
from .subscription import CompletionWatcher, Subscription

T = TypeVar("T")
OnEnded = Callable[[list[Subscription]], None]
# What happens to unfinished requests when the engine pauses or gets other weights.
PauseMode = Literal["abort", "wait", "keep"]


class Session:
    """The requests of all callers in one engine. Every method may be called from any thread.

    subscriptions: by id, from `assign_ids` until `drop`
    audit_log: audit log, which receives each request that has ended
    answer_realm: realm of the answers, renewed with the weights; None unless a replica may resume answers
    drivers: drivers that step this engine, called by `wake`

    Finalizers may run at any point, so they only enqueue a drop. It is executed when the engine is released
    (`hold_engine`), or held next.
    """

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine
        self.audit_log: AuditLog | None = None
        self.answer_realm: AnswerRealm | None = None
        self.subscriptions: dict[str, Subscription] = {}
        self._queue = CompletionWatcher([])  # subscriptions that `step` and `wait_queued` return
        self._watchers = [self._queue]
        self._to_drop: deque[Subscription] = deque()
        self._ids = itertools.count()
        self._lock, self._is_busy = threading.RLock(), False
        self.drivers = weakref.WeakSet[Any]()
        if engine.warmup is not None:
            engine.warmup.start_threads(partial(warm_up_idle_session, weakref.ref(self), engine.warmup))

    def warm_up_once(self) -> bool:
        """Run one step of an idle engine's warm-up. Returns whether it did."""
        with self.hold_engine():
            return self._engine is not None and self._engine.advance_warmup_if_idle()

    @property
    def engine(self) -> Engine:
        """The engine of all callers. Raises RuntimeError after `close`, and in a forked process."""
        require_not_forked()
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    def wake(self) -> None:
        """Make drivers look for work: the engine may step again, or requests have ended."""
        for driver in list(self.drivers):
            driver.wake()

    @property
    def num_queued(self) -> int:
        """Number of subscriptions that `step` or `wait_queued` will still return."""
        return len(self._queue.unfinished) + len(self._queue.ended)

    @contextmanager
    def hold_engine(self) -> Iterator[None]:
        """Exclude other threads, and defer Ctrl-C until the engine is in a consistent state.

        Raises RuntimeError in a forked process.
        """
        require_not_forked()
        with defer_interrupt(), self._lock:
            is_outermost, self._is_busy = not self._is_busy, True
            try:
                if is_outermost:
                    self._drop_enqueued()
                yield
            finally:
                if is_outermost:
                    self._release_engine()

    def _release_engine(self) -> None:
        """Do what waits for the end of a turn. Finalizers that run meanwhile only enqueue drops."""
        try:
            self._note_ends()
            self._drop_enqueued()
        finally:
            self._is_busy = False

    # ------------------------------------------------------------ ids

    def assign_ids(self, subscriptions: Sequence[Subscription], id: str | None = None) -> None:
        """Give subscriptions free ids, or the only one `id`, until they are dropped. Raises ValueError for an
        empty id, and for one in use."""
        if id == "":
            raise ValueError("request_id '' is not allowed: at least one character")
        with self.hold_engine():
            if id in self.subscriptions:
                raise ValueError(f"request_id {id!r} is in use")
            unused = (new for n in self._ids if (new := str(n)) not in self.subscriptions)
            ids = list(itertools.islice(unused, len(subscriptions))) if id is None else [id]
            for subscription, assigned in zip(subscriptions, ids, strict=True):
                subscription.id = assigned
                for request in subscription.requests:
                    request.id = assigned
                self.subscriptions[assigned] = subscription

    def has(self, subscription: Subscription) -> bool:
        """Return whether a subscription has an id here."""
        return self.subscriptions.get(subscription.id) is subscription

    # ------------------------------------------------------------ steps

    def step_engine(self) -> None:
        """Step the engine, if it has work. The caller holds it."""
        if self.engine.has_work:
            self.engine.step()
            self._note_ends()

    def _note_ends(self) -> None:
        """Log the requests that have ended, and tell the watchers."""
        for request in self._engine.take_ended() if self._engine is not None else ():
            subscription = self.subscriptions.get(request.id)
            if self.audit_log is not None:
                index = 0 if subscription is None else subscription.requests.index(request)
                self.audit_log.on_request_end(request, index)
            if subscription is not None:
                self._tell_watchers(subscription)

    def _tell_watchers(self, subscription: Subscription) -> None:
        if subscription.is_finished:
            for watcher in self._watchers:
                watcher.on_end(subscription)

    def _run_until(self, is_over: Callable[[], bool], take: Callable[[], list[T]]) -> Iterator[list[T]]:
        """Yield what `take` returns, until `is_over`. Steps the engine only if `take` returns nothing: steps
        of other callers produce outputs too."""
        while not is_over():
            with self.hold_engine():
                _ = self.engine  # raises if the LLM is closed, whatever there is to take
                if not (news := take()):
                    self.step_engine()
            yield news

    def submit_and_run(self, subscriptions: Sequence[Subscription], use_tqdm: Tqdm = False) -> None:
        """Submit subscriptions, run them to their end, and drop them. An interrupt aborts unfinished
        ones."""
        try:
            with show_progress(len(subscriptions), use_tqdm) as on_ended:
                self.submit(subscriptions)
                self.run(subscriptions, on_ended)
        finally:  # also if no bar can be made
            self.drop(subscriptions)

    def run(self, subscriptions: Sequence[Subscription], on_ended: OnEnded = lambda ended: None) -> None:
        """Step until all subscriptions have ended. Between steps `on_ended` gets a list of newly ended
        ones."""
        with self.hold_engine():
            watcher = CompletionWatcher(subscriptions)
            self._watchers.append(watcher)
        try:
            for ended in self._run_until(lambda: watcher.is_at_end, watcher.take):
                on_ended(ended)
        finally:
            with self.hold_engine():  # other threads' turns iterate over the list
                self._watchers.remove(watcher)

    def submit(self, subscriptions: Sequence[Subscription]) -> None:
        """Submit the requests of subscriptions. Those without an id get one."""
        with self.hold_engine():
            self.assign_ids([s for s in subscriptions if not s.id])
            for subscription in subscriptions:
                for request in subscription.requests:
                    if not request.is_finished:  # aborted before
                        self.engine.submit(request)
                subscription.is_submitted = True

    # ------------------------------------------------------------ streams

    def stream(self, subscription: Subscription) -> Generator[CompletionOutput]:
        """Yield the outputs of a subscription as they come. It is submitted when the first is requested, and
        dropped with the generator."""
        outputs = self._stream_outputs(subscription)
        # a generator that never begins runs no `finally`
        weakref.finalize(outputs, self._enqueue_drop, subscription).atexit = False
        return outputs

    def _stream_outputs(self, subscription: Subscription) -> Generator[CompletionOutput]:
        try:
            self.submit([subscription])
            for outputs in self._run_until(lambda: subscription.is_at_end, subscription.take_outputs):
                yield from outputs
        finally:
            self._enqueue_drop(subscription)

    def _enqueue_drop(self, subscription: Subscription) -> None:
        """Drop a subscription now, or at the end of the current turn. Does nothing in a forked process."""
        if is_forked():
            return
        self._to_drop.append(subscription)
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_busy:
                    with self.hold_engine():
                        pass
            finally:
                self._lock.release()

    # ------------------------------------------------------------ one step at a time

    def enqueue(self, subscriptions: Sequence[Subscription]) -> None:
        """Submit subscriptions. `step` or `wait_queued` returns them once they have ended."""
        with self.hold_engine():
            self.submit(subscriptions)
            for subscription in subscriptions:
                self._queue.unfinished[subscription.id] = subscription
                self._tell_watchers(subscription)

    def step(self) -> list[Subscription]:
        """Step the engine once. Returns the queued subscriptions that have ended since the last call."""
        with self.hold_engine():
            self.step_engine()
            return self._take_from_queue(self._queue.ended.values())

    def wait_queued(self, on_ended: OnEnded) -> list[Subscription]:
        """Run all queued subscriptions to their end. Returns all that no other caller has taken."""
        with self.hold_engine():
            queued = [*self._queue.unfinished.values(), *self._queue.ended.values()]
        self.run(queued, on_ended)
        with self.hold_engine():
            return self._take_from_queue(s for s in queued if self._queue.ended.get(s.id) is s)

    def _take_from_queue(self, subscriptions: Iterable[Subscription]) -> list[Subscription]:
        """Remove ended subscriptions from the queue. Returns them in the order in which they were made."""
        taken = sorted(subscriptions, key=lambda subscription: subscription.requests[0].arrival)
        for subscription in taken:
            self._drop(subscription)
        return taken

    # ------------------------------------------------------------ ends

    def abort(self, id: str) -> None:
        """Abort the requests of an id, submitted or not. Unknown ids are ignored."""
        with self.hold_engine():
            if (subscription := self.subscriptions.get(id)) is not None:
                self._abort(subscription)
        self.wake()

    def _abort(self, subscription: Subscription) -> None:
        for request in subscription.requests:
            if subscription.is_submitted:
                self.engine.abort(request)
            elif not request.is_finished:
                request.finish("abort")
        self._note_ends()
        self._tell_watchers(subscription)

    def abort_or_drain(self, mode: PauseMode) -> None:
        """Abort unfinished requests ("abort"), run them to their end ("wait"), or do nothing ("keep").
        Requests that arrive meanwhile are kept. Raises ValueError for another mode."""
        check_pause_mode(mode)
        with self.hold_engine():
            submitted = [s for s in self.subscriptions.values() if s.is_submitted]
            for subscription in submitted if mode == "abort" else ():
                self._abort(subscription)
        if mode == "abort":
            self.wake()  # drivers bring the ends, also if the engine takes no steps
        if mode == "wait":
            self.run(submitted)

    def drop(self, subscriptions: Sequence[Subscription]) -> None:
        """Free the ids of subscriptions, and abort unfinished ones."""
        with self.hold_engine():
            for subscription in subscriptions:
                self._drop(subscription)

    def _drop_enqueued(self) -> None:
        while self._to_drop:
            self._drop(self._to_drop.popleft())

    def _drop(self, subscription: Subscription) -> None:
        if not self.has(subscription):
            return  # dropped before; its id may be another's now
        if subscription.is_submitted and self._engine is not None:
            self._abort(subscription)
        del self.subscriptions[subscription.id]
        self._queue.forget(subscription.id)

    def close(self) -> None:
        """End the warm-up, all requests, and the engine."""
        with self.hold_engine():
            if self._engine is not None and self._engine.warmup is not None:
                self._engine.warmup.stop()
            self.drop(list(self.subscriptions.values()))
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
        self.wake()


def check_pause_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode={mode!r} is not allowed: 'abort', 'wait' or 'keep'")


def warm_up_idle_session(session_ref: "weakref.ref[Session]", warmup: Warmup) -> bool:
    """Run one step of the warm-up of a session's idle engine. Returns whether it did. Stops the warm-up if
    the session is gone."""
    session = session_ref()
    if session is None:
        warmup.stop()
    return session is not None and session.warm_up_once()
