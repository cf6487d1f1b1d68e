"""The requests of all callers in one engine: ids, exclusive turns, and the loops in which callers step it."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from ..engine.core.engine import Engine
from ..engine.core.request import Request
from ..host.process import is_forked, require_not_forked
from ..host.signals import defer_interrupt
from ..runtime.equal_bits.warmup import Warmup
from ..text.outputs import Delta
from .audit.answer_realm import AnswerRealm
from .audit.log import AuditLog
from .progress_bar import Tqdm, show_progress
from .request_group import CompletionWatcher, RequestGroup, StreamCursor

T = TypeVar("T")
GroupFactory = Callable[[str], RequestGroup]  # makes a group, given its id
OnEnded = Callable[[list[RequestGroup]], None]
# What happens to unfinished requests when the engine pauses or gets other weights.
PauseMode = Literal["abort", "wait", "keep"]


class Session:
    """The requests of all callers in one engine. Every method may be called from any thread.

    groups: by id, from the reservation of the id until `drop_groups`; None while a group is being made
    audit_log: audit log, which receives each request that has ended
    answer_realm: realm of the answers, renewed with the weights; None unless a replica may resume answers
    drivers: drivers that step this engine, called by `wake`

    Finalizers may run at any point, so they only enqueue a drop. It is executed at the end of the current
    turn, or at the start of the next.
    """

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine
        self.audit_log: AuditLog | None = None
        self.answer_realm: AnswerRealm | None = None
        self.groups: dict[str, RequestGroup | None] = {}
        self._queue = CompletionWatcher([])  # groups that `step` and `wait_queued` return
        self._watchers = [self._queue]
        self._to_drop: deque[RequestGroup] = deque()
        self._ids = itertools.count()
        self._lock, self._is_busy = threading.RLock(), False
        self.drivers = weakref.WeakSet[Any]()  # those that step this engine; `wake` calls them
        engine.on_request_end = make_weak_method(self.on_request_end)
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
        """Number of groups that `step` or `wait_queued` will still return."""
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
                    self._drop_enqueued()
                    self._is_busy = False

    # ------------------------------------------------------------ ids

    def make_groups(
        self, group_factories: Sequence[GroupFactory], id: str | None = None
    ) -> list[RequestGroup]:
        """Make a group with each of `group_factories`, for free ids or for `id`. The ids are reserved until
        the groups are dropped.

        Raises ValueError for an id in use, and the errors of `group_factories`; the ids are then free again.
        """
        ids = self._reserve_ids(len(group_factories), id)
        try:
            groups = [make(id) for make, id in zip(group_factories, ids, strict=True)]
        except BaseException:
            with self.hold_engine():
                for taken in ids:
                    del self.groups[taken]
            raise
        with self.hold_engine():
            self.groups |= {group.id: group for group in groups}
        return groups

    def _reserve_ids(self, count: int, id: str | None) -> list[str]:
        with self.hold_engine():
            if id in self.groups:
                raise ValueError(f"request_id {id!r} is in use")
            unused = (new for n in self._ids if (new := str(n)) not in self.groups)
            ids = list(itertools.islice(unused, count)) if id is None else [id]
            self.groups |= dict.fromkeys(ids)
        return ids

    # ------------------------------------------------------------ steps

    def step_engine(self) -> None:
        """Step the engine, if it has work."""
        with self.hold_engine():
            if self.engine.has_work:
                self.engine.step()

    def _run_until(self, is_over: Callable[[], bool], take: Callable[[], list[T]]) -> Iterator[list[T]]:
        """Yield what `take` returns, until `is_over`. Steps the engine only if `take` returns nothing: steps
        of other callers produce outputs too."""
        while not is_over():
            with self.hold_engine():
                engine = self.engine  # raises if the LLM is closed, whatever there is to take
                if not (news := take()) and engine.has_work:
                    engine.step()
            yield news

    def make_and_run_groups(
        self, group_factories: Sequence[GroupFactory], use_tqdm: Tqdm = False
    ) -> list[RequestGroup]:
        """Make groups and run them to their end. An interrupt aborts the groups that have not ended."""
        groups = self.make_groups(group_factories)
        try:
            with show_progress(len(groups), use_tqdm) as on_ended:
                self.submit_groups(groups)
                self.run_groups(groups, on_ended)
        finally:  # also if no bar can be made
            self.drop_groups(groups)
        return groups

    def run_groups(self, groups: Sequence[RequestGroup], on_ended: OnEnded = lambda ended: None) -> None:
        """Step until all groups have ended. Between steps `on_ended` gets the groups that have ended
        since."""
        with self.hold_engine():
            watcher = CompletionWatcher(groups)
            self._watchers.append(watcher)
        try:
            for ended in self._run_until(lambda: watcher.is_at_end, watcher.take):
                on_ended(ended)
        finally:
            with self.hold_engine():  # other threads' turns iterate over the list
                self._watchers.remove(watcher)

    def _on_group_end(self, group: RequestGroup | None) -> None:
        if group is not None and group.is_finished:
            for watcher in self._watchers:
                watcher.on_group_end(group)

    def on_request_end(self, request: Request) -> None:
        """Log a request that has ended, and note the end of its group. The engine calls this."""
        group = self.groups.get(request.id)
        if self.audit_log is not None:
            self.audit_log.on_request_end(request, 0 if group is None else group.requests.index(request))
        self._on_group_end(group)

    def submit_groups(self, groups: Sequence[RequestGroup]) -> None:
        with self.hold_engine():
            for group in groups:
                for request in group.requests:
                    if not request.is_finished:  # aborted before
                        self.engine.submit(request)
                group.is_submitted = True

    # ------------------------------------------------------------ streams

    def stream(self, group: RequestGroup) -> Generator[Delta]:
        """Yield the deltas of a group. The group is submitted when the first is requested, and dropped with
        the generator."""
        deltas = self._stream_deltas(group)
        # a generator that never begins runs no `finally`
        weakref.finalize(deltas, self._enqueue_drop, group).atexit = False
        return deltas

    def _stream_deltas(self, group: RequestGroup) -> Generator[Delta]:
        cursor = StreamCursor(group)

        def take() -> list[Delta]:
            return cursor.take() if self.engine else []  # `engine` raises after `close`

        try:
            self.submit_groups([group])
            for pieces in self._run_until(lambda: cursor.is_at_end, take):
                yield from pieces
        finally:
            self._enqueue_drop(group)

    def _enqueue_drop(self, group: RequestGroup) -> None:
        """Drop a group now, or at the end of the current turn. Does nothing in a forked process."""
        if is_forked():
            return
        self._to_drop.append(group)
        if self._lock.acquire(blocking=False):
            try:
                if not self._is_busy:
                    with self.hold_engine():
                        pass
            finally:
                self._lock.release()

    # ------------------------------------------------------------ one step at a time

    def queue_groups(self, groups: Sequence[RequestGroup]) -> None:
        """Submit groups. `step` or `wait_queued` returns them once they have ended."""
        with self.hold_engine():
            self.submit_groups(groups)
            for group in groups:
                self._queue.unfinished[group.id] = group
                self._on_group_end(group)

    def step(self) -> list[RequestGroup]:
        """Step the engine once. Returns the queued groups that have ended since the last call."""
        with self.hold_engine():
            self.step_engine()
            return self._take_from_queue(self._queue.ended.values())

    def wait_queued(self, on_ended: OnEnded) -> list[RequestGroup]:
        """Run all queued groups to their end. Returns the groups that no other caller has taken."""
        with self.hold_engine():
            groups = [*self._queue.unfinished.values(), *self._queue.ended.values()]
        self.run_groups(groups, on_ended)
        with self.hold_engine():
            return self._take_from_queue(
                group for group in groups if self._queue.ended.get(group.id) is group
            )

    def _take_from_queue(self, groups: Iterable[RequestGroup]) -> list[RequestGroup]:
        """Remove ended groups from the queue. Returns them in the order in which they were made."""
        taken = sorted(groups, key=lambda group: group.requests[0].arrival)
        self.drop_groups(taken)
        return taken

    # ------------------------------------------------------------ ends

    def abort(self, id: str) -> None:
        """Abort the requests of an id, submitted or not. Unknown ids are ignored."""
        with self.hold_engine():
            group = self.groups.get(id)
            if group is not None:
                self._abort_group(group)
        self.wake()

    def _abort_group(self, group: RequestGroup) -> None:
        for request in group.requests:
            if group.is_submitted:
                self.engine.abort(request)
            elif not request.is_finished:
                request.finish("abort")
        self._on_group_end(group)

    def abort_or_drain(self, mode: PauseMode) -> None:
        """Abort unfinished requests ("abort"), run them to their end ("wait"), or do nothing ("keep").
        Requests that arrive meanwhile are kept. Raises ValueError for another mode."""
        check_pause_mode(mode)
        with self.hold_engine():
            submitted = [group for group in self.groups.values() if group and group.is_submitted]
            for group in submitted if mode == "abort" else ():
                self._abort_group(group)
        if mode == "wait":
            self.run_groups(submitted)

    def drop_groups(self, groups: Sequence[RequestGroup]) -> None:
        """Free the ids of groups, and abort the groups that have not ended."""
        with self.hold_engine():
            for group in groups:
                self._drop_group(group)

    def _drop_enqueued(self) -> None:
        while self._to_drop:
            self._drop_group(self._to_drop.popleft())

    def _drop_group(self, group: RequestGroup) -> None:
        if self.groups.get(group.id) is not group:
            return  # dropped before; its id may be another's now
        if group.is_submitted and self._engine is not None:
            self._abort_group(group)
        del self.groups[group.id]
        self._queue.forget(group.id)

    def close(self) -> None:
        """End the warm-up, all requests, and the engine."""
        with self.hold_engine():
            if self._engine is not None and self._engine.warmup is not None:
                self._engine.warmup.stop()
            self.drop_groups([group for group in self.groups.values() if group is not None])
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
        self.wake()


def check_pause_mode(mode: str) -> None:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode={mode!r} is not allowed: 'abort', 'wait' or 'keep'")


def warm_up_idle_session(session_ref: "weakref.ref[Session]", warmup: Warmup) -> bool:
    """Run one step of the warm-up of a session's idle engine. Returns whether it did. Stops the warm-up if
    the session is gone."""
    session = session_ref()
    if session is None:
        warmup.stop()
    return session is not None and session.warm_up_once()


def make_weak_method(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls a method by a weak reference, so its object is not kept alive."""
    method_ref = weakref.WeakMethod(method)

    def call(value: T) -> None:
        if (live_method := method_ref()) is not None:
            live_method(value)

    return call
