"""The requests of all callers in one engine: ids, turns, and the loops in which a caller steps the engine."""

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
from ..host.process import is_inherited, require_own_threads
from ..host.signals import uninterrupted
from ..runtime.equal_bits.warmup import Warmup
from ..text.outputs import Delta
from .audit.log import AuditLog
from .audit.realms import Realms
from .bar import Tqdm, progress
from .request_group import CompletionWatcher, RequestGroup, StreamCursor

T = TypeVar("T")
Make = Callable[[str], RequestGroup]  # of an id
OnEnded = Callable[[list[RequestGroup]], None]
Mode = Literal[
    "abort", "wait", "keep"
]  # of unfinished requests, when the engine pauses or gets other weights


class Session:
    """The requests of all callers in one engine. Every method may be called from any thread.

    groups: by id, from the reservation of the id until `drop`; None while a group is being made.
    log: receives each request that has ended.
    realms: renewed with the weights, if answers may be resumed on another replica.

    Finalizers may run at any point, so they only enqueue a drop: it is executed at the end of the current
    turn, or at the start of the next.
    """

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine
        self.log: AuditLog | None = None
        self.realms: Realms | None = None
        self.groups: dict[str, RequestGroup | None] = {}
        self._queue = CompletionWatcher([])  # groups that `step` and `wait` return
        self._watches = [self._queue]
        self._to_drop: deque[RequestGroup] = deque()
        self._ids = itertools.count()
        self._lock, self._busy = threading.RLock(), False
        self.drivers = weakref.WeakSet[Any]()  # those that step this engine; `wake` calls them
        engine.on_end, engine.on_warmup = weakly(self.request_ended), weakly(self._begin_warmup)
        if engine.warmup is not None:
            engine.on_warmup(engine.warmup)

    def _begin_warmup(self, warmup: Warmup) -> None:
        warmup.begin(partial(warm_idle, weakref.ref(self), warmup))

    def warm(self) -> bool:
        """Let an idle engine's warm-up advance by one run; return whether it did."""
        with self.turn():
            return self._engine is not None and self._engine.warm()

    @property
    def engine(self) -> Engine:
        """Raises RuntimeError after `close`, and in a forked process."""
        require_own_threads()
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    def wake(self) -> None:
        """Let drivers look again for work: the engine may step again, or requests have ended."""
        for driver in list(self.drivers):
            driver.wake()

    @property
    def count_queued(self) -> int:
        """Number of groups that `step` or `wait` are still to return."""
        return len(self._queue.unfinished) + len(self._queue.ended)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclude other threads, and defer Ctrl-C until the engine is in a consistent state.

        Raises RuntimeError in a forked process.
        """
        require_own_threads()
        with uninterrupted(), self._lock:
            outermost, self._busy = not self._busy, True
            try:
                if outermost:
                    self._drop_enqueued()
                yield
            finally:
                if outermost:
                    self._drop_enqueued()
                    self._busy = False

    # ------------------------------------------------------------ ids

    def groups_of(self, makes: Sequence[Make], id: str | None = None) -> list[RequestGroup]:
        """Make groups for free ids, or one for `id`; the ids are reserved until the groups are dropped.

        Raises ValueError for an id in use, and the errors of `makes`: the ids are then free again.
        """
        ids = self._take_ids(len(makes), id)
        try:
            groups = [make(id) for make, id in zip(makes, ids, strict=True)]
        except BaseException:
            with self.turn():
                for taken in ids:
                    del self.groups[taken]
            raise
        with self.turn():
            self.groups |= {group.id: group for group in groups}
        return groups

    def _take_ids(self, count: int, id: str | None) -> list[str]:
        with self.turn():
            if id in self.groups:
                raise ValueError(f"request_id {id!r} is in use")
            unused = (new for n in self._ids if (new := str(n)) not in self.groups)
            ids = list(itertools.islice(unused, count)) if id is None else [id]
            self.groups |= dict.fromkeys(ids)
        return ids

    # ------------------------------------------------------------ steps

    def advance(self) -> None:
        """Step the engine, if it has work."""
        with self.turn():
            if self.engine.has_work:
                self.engine.step()

    def _run_until(self, is_over: Callable[[], bool], take: Callable[[], list[T]]) -> Iterator[list[T]]:
        """Yield what `take` finds, which other callers' steps may have brought, until `is_over`; step only if
        it finds nothing."""
        while not is_over():
            with self.turn():
                engine = self.engine  # raises if the LLM is closed, whatever there is to take
                if not (found := take()) and engine.has_work:
                    engine.step()
            yield found

    def complete(self, makes: Sequence[Make], use_tqdm: Tqdm = False) -> list[RequestGroup]:
        """Make groups and run them to their end; an interrupt aborts the rest."""
        groups = self.groups_of(makes)
        try:
            with progress(len(groups), use_tqdm) as on_ended:
                self.submit(groups)
                self.run(groups, on_ended)
        finally:  # also if no bar can be made
            self.drop(groups)
        return groups

    def run(self, groups: Sequence[RequestGroup], on_ended: OnEnded = lambda ended: None) -> None:
        """Step until all groups have ended, calling `on_ended` between steps with those that have."""
        with self.turn():
            watch = CompletionWatcher(groups)
            self._watches.append(watch)
        try:
            for ended in self._run_until(lambda: watch.at_end, watch.take):
                on_ended(ended)
        finally:
            with self.turn():  # other threads' turns iterate over the list
                self._watches.remove(watch)

    def _note_end(self, group: RequestGroup | None) -> None:
        if group is not None and group.finished:
            for watch in self._watches:
                watch.note_end(group)

    def request_ended(self, request: Request) -> None:
        """The engine's callback for each request that ends."""
        group = self.groups.get(request.id)
        if self.log is not None:
            self.log.ended(request, 0 if group is None else group.requests.index(request))
        self._note_end(group)

    def submit(self, groups: Sequence[RequestGroup]) -> None:
        with self.turn():
            for group in groups:
                for request in group.requests:
                    if not request.finished:  # aborted before
                        self.engine.submit(request)
                group.submitted = True

    # ------------------------------------------------------------ streams

    def stream(self, group: RequestGroup) -> Generator[Delta]:
        """Generate the news of a group; it is submitted with the first piece, and dropped with the
        generator."""
        pieces = self._pieces(group)
        # a generator that never begins runs no `finally`
        weakref.finalize(pieces, self._enqueue_drop, group).atexit = False
        return pieces

    def _pieces(self, group: RequestGroup) -> Generator[Delta]:
        cursor = StreamCursor(group)

        def take() -> list[Delta]:
            return cursor.take() if self.engine else []  # `engine` raises after `close`

        try:
            self.submit([group])
            for pieces in self._run_until(lambda: cursor.at_end, take):
                yield from pieces
        finally:
            self._enqueue_drop(group)

    def _enqueue_drop(self, group: RequestGroup) -> None:
        """Drop a group now, or at the end of the turn under way; in a forked process never."""
        if is_inherited():
            return
        self._to_drop.append(group)
        if self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    with self.turn():
                        pass
            finally:
                self._lock.release()

    # ------------------------------------------------------------ one step at a time

    def queue(self, groups: Sequence[RequestGroup]) -> None:
        """Submit groups for `step` or `wait` to return."""
        with self.turn():
            self.submit(groups)
            for group in groups:
                self._queue.unfinished[group.id] = group
                self._note_end(group)

    def step(self) -> list[RequestGroup]:
        """Advance all requests by one step; return the queued groups that have ended since the last call."""
        with self.turn():
            self.advance()
            return self._claim(self._queue.ended.values())

    def wait(self, on_ended: OnEnded) -> list[RequestGroup]:
        """Run all queued groups to their end; return those that no other caller has taken."""
        with self.turn():
            groups = [*self._queue.unfinished.values(), *self._queue.ended.values()]
        self.run(groups, on_ended)
        with self.turn():
            return self._claim(group for group in groups if self._queue.ended.get(group.id) is group)

    def _claim(self, groups: Iterable[RequestGroup]) -> list[RequestGroup]:
        """Take groups that have ended out of the queue, in the order in which they were made."""
        mine = sorted(groups, key=lambda group: group.requests[0].arrival)
        self.drop(mine)
        return mine

    # ------------------------------------------------------------ ends

    def abort(self, id: str) -> None:
        """End the requests of an id, also those not yet submitted; unknown ids are ignored."""
        with self.turn():
            group = self.groups.get(id)
            if group is not None:
                self._abort(group)
        self.wake()

    def _abort(self, group: RequestGroup) -> None:
        for request in group.requests:
            if group.submitted:
                self.engine.abort(request)
            elif not request.finished:
                request.finish("abort")
        self._note_end(group)

    def settle(self, mode: Mode) -> None:
        """Abort what is unfinished ("abort"), run it to its end ("wait"), or leave it ("keep"). Requests that
        arrive meanwhile are kept. Raises ValueError for another mode."""
        check_mode(mode)
        with self.turn():
            begun = [group for group in self.groups.values() if group and group.submitted]
            for group in begun if mode == "abort" else ():
                self._abort(group)
        if mode == "wait":
            self.run(begun)

    def drop(self, groups: Sequence[RequestGroup]) -> None:
        """Free the ids of groups, and abort those that have not ended."""
        with self.turn():
            for group in groups:
                self._drop(group)

    def _drop_enqueued(self) -> None:
        while self._to_drop:
            self._drop(self._to_drop.popleft())

    def _drop(self, group: RequestGroup) -> None:
        if self.groups.get(group.id) is not group:
            return  # dropped before; its id may be another's now
        if group.submitted and self._engine is not None:
            self._abort(group)
        del self.groups[group.id]
        self._queue.forget(group.id)

    def close(self) -> None:
        """End all requests, and the engine."""
        with self.turn():
            if self._engine is not None and self._engine.warmup is not None:
                self._engine.warmup.stop()
            self.drop([group for group in self.groups.values() if group is not None])
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()
        self.wake()


def check_mode(mode: str) -> None:
    if mode not in ("abort", "wait", "keep"):
        raise ValueError(f"mode={mode!r} is not allowed: 'abort', 'wait' or 'keep'")


def warm_idle(session: "weakref.ref[Session]", warmup: Warmup) -> bool:
    """Let a session's engine advance in its warm-up by one run; return whether it did. The warm-up ends with
    the session."""
    found = session()
    if found is None:
        warmup.stop()
    return found is not None and found.warm()


def weakly(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls a method, and does not keep its object alive."""
    alive = weakref.WeakMethod(method)

    def call(value: T) -> None:
        if (found := alive()) is not None:
            found(value)

    return call
