"""Many callers and one engine: tickets by id, whose turn it is, and who drives while several wait."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..engine.core.engine import Engine
from ..engine.core.request import Request
from ..host.process import is_inherited, require_own_threads
from ..host.signals import uninterrupted
from ..runtime.equal_bits.warmup import Warmup
from ..text.outputs import Delta
from .audit.log import AuditLog
from .audit.realms import Realms
from .ticket import RequestGroup, StreamCursor


class CompletionWatcher:
    """Whole tickets that somebody waits for, and those of them that have ended, in the order of their
    ends."""

    def __init__(self, tickets: Sequence[RequestGroup]):
        self.left = {ticket.id: ticket for ticket in tickets if not ticket.finished}
        self.ended = {ticket.id: ticket for ticket in tickets if ticket.finished}

    def saw(self, ticket: RequestGroup) -> None:
        if self.left.get(ticket.id) is ticket:
            self.ended[ticket.id] = self.left.pop(ticket.id)

    def taken(self) -> list[RequestGroup]:
        """Those that have ended since the last call."""
        ended, self.ended = self.ended, {}
        return list(ended.values())

    def forget(self, id: str) -> None:
        self.left.pop(id, None)
        self.ended.pop(id, None)


Make = Callable[[str], RequestGroup]  # of an id
Done = Callable[[list[RequestGroup]], None]


class Session:
    """The requests of all callers in one engine. Every method may be called from any thread.

    A ticket's id is taken before the ticket exists, and until `drop`. Whoever may run at any instant, as the
    garbage collector does, only says what is to be dropped: the turn under way, or the next, does it.
    """

    def __init__(self, engine: Engine):
        self._engine: Engine | None = engine
        self.log: AuditLog | None = None  # which hears of requests that have ended
        self.realms: Realms | None = None  # renewed with the weights, where answers may go on elsewhere
        engine.on_end = listener(self)
        self.tickets: dict[str, RequestGroup | None] = {}  # None where a ticket is in the making
        self._queued: dict[str, RequestGroup] = {}  # those of them that `step` returns, in order
        self._watches = [CompletionWatcher([])]  # the first is of those that `step` returns
        self._leaving: deque[RequestGroup] = deque()
        self._ids = itertools.count()
        self._lock, self._busy = threading.RLock(), False
        engine.on_warmup = starter(self)
        if engine.warmup is not None:
            engine.on_warmup(engine.warmup)

    def warm(self) -> bool:
        """Let an idle engine's warm-up advance by a run; says whether it did."""
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
    def count_queued(self) -> int:
        """Tickets that `step` or `wait` are still to return."""
        return len(self._queued)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One caller at a time, and none is interrupted while the engine is between two states.

        Raises RuntimeError in a forked process.
        """
        require_own_threads()
        with uninterrupted(), self._lock:
            outermost, self._busy = not self._busy, True
            try:
                if outermost:
                    self._drop_leaving()
                yield
            finally:
                if outermost:
                    self._drop_leaving()
                    self._busy = False

    # ------------------------------------------------------------ ids

    def tickets_of(self, makes: Sequence[Make], id: str | None = None) -> list[RequestGroup]:
        """Tickets made for free ids, or for the one `id`; the ids are reserved until the tickets are dropped.

        Raises ValueError for an id that is in use, and whatever a `make` raises: the ids are free again then.
        """
        ids = self._take_ids(len(makes), id)
        try:
            tickets = [make(id) for make, id in zip(makes, ids, strict=True)]
        except BaseException:
            with self.turn():
                for taken in ids:
                    del self.tickets[taken]
            raise
        with self.turn():
            self.tickets |= {ticket.id: ticket for ticket in tickets}
        return tickets

    def _take_ids(self, count: int, id: str | None) -> list[str]:
        with self.turn():
            if id in self.tickets:
                raise ValueError(f"request_id {id!r} is in use")
            unused = (new for n in self._ids if (new := str(n)) not in self.tickets)
            ids = list(itertools.islice(unused, count)) if id is None else [id]
            self.tickets |= dict.fromkeys(ids)
        return ids

    # ------------------------------------------------------------ whole results

    def finish(self, tickets: list[RequestGroup], done: Done) -> None:
        """Run tickets to their end, calling `done` with the ended ones; an interrupt aborts the rest."""
        try:
            self.submit(tickets)
            self._run(tickets, done)
        finally:
            self.drop(tickets)

    def _run(self, tickets: list[RequestGroup], done: Done) -> None:
        with self.turn():
            watch = CompletionWatcher(tickets)
            self._watches.append(watch)
        try:
            while watch.left or watch.ended:
                with self.turn():
                    if watch.left:
                        self.engine.step()
                    ended = watch.taken()
                done(ended)
        finally:
            with self.turn():  # others' turns go through the list
                self._watches.remove(watch)

    def _see(self, ticket: RequestGroup | None) -> None:
        """Tell those who wait for a ticket, where it has ended."""
        if ticket is not None and ticket.finished:
            for watch in self._watches:
                watch.saw(ticket)

    def _ended(self, request: Request) -> None:
        ticket = self.tickets.get(request.id)
        if self.log is not None:
            self.log.ended(request, 0 if ticket is None else ticket.requests.index(request))
        self._see(ticket)

    def submit(self, tickets: list[RequestGroup]) -> None:
        with self.turn():
            for ticket in tickets:
                for request in ticket.requests:
                    if not request.finished:  # aborted before
                        self.engine.submit(request)
                ticket.submitted = True

    # ------------------------------------------------------------ streams

    def stream(self, ticket: RequestGroup) -> Generator[Delta]:
        """What is new of a ticket; it is submitted with the first piece, and dropped with the generator."""
        pieces = self._pieces(ticket)
        weakref.finalize(
            pieces, self._leave, ticket
        ).atexit = False  # one that never begins runs no `finally`
        return pieces

    def _pieces(self, ticket: RequestGroup) -> Generator[Delta]:
        """First whatever another caller's steps have brought, and a step only where there is nothing."""
        cursor = StreamCursor(ticket)
        try:
            self.submit([ticket])
            while not cursor.at_end:
                with self.turn():
                    engine, pieces = self.engine, cursor.take()
                    if not pieces:
                        engine.step()
                yield from pieces
        finally:
            self._leave(ticket)

    def _leave(self, ticket: RequestGroup) -> None:
        """Drop a ticket now, or, where a turn is under way, at its end; in a forked process never."""
        if is_inherited():
            return
        self._leaving.append(ticket)
        if self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    with self.turn():
                        pass
            finally:
                self._lock.release()

    # ------------------------------------------------------------ one step at a time

    def queue(self, tickets: list[RequestGroup]) -> None:
        """Submit tickets that `step` or `wait` return."""
        with self.turn():
            self.submit(tickets)
            for ticket in tickets:
                self._queued[ticket.id] = self._watches[0].left[ticket.id] = ticket
                self._see(ticket)

    def step(self) -> list[RequestGroup]:
        """Advance all requests by one step; returns the queued tickets that have finished since."""
        with self.turn():
            if self.engine.has_work:
                self.engine.step()
            return self._give(sorted(self._watches[0].taken(), key=lambda ticket: ticket.place))

    def wait(self, done: Done) -> list[RequestGroup]:
        """Run all queued tickets to their end; returns them in the order of their queueing."""
        tickets = list(self._queued.values())
        self._run(tickets, done)
        with self.turn():
            return self._give(tickets)

    def _give(self, tickets: list[RequestGroup]) -> list[RequestGroup]:
        """Tickets that nobody else has received; they leave the queue."""
        mine = [ticket for ticket in tickets if self._queued.get(ticket.id) is ticket]
        self.drop(mine)
        return mine

    # ------------------------------------------------------------ ends

    def abort(self, id: str) -> None:
        """End what runs under an id, and what has not begun yet before it does; unknown ids are ignored."""
        with self.turn():
            ticket = self.tickets.get(id)
            if ticket is not None:
                self._abort(ticket)

    def _abort(self, ticket: RequestGroup) -> None:
        for request in ticket.requests:
            if ticket.submitted:
                self.engine.abort(request)
            elif not request.finished:
                request.finish("abort")
        self._see(ticket)

    def settle(self, mode: str) -> None:
        """End what is unfinished ("abort"), or run it to its end ("wait"); of another mode nothing. Requests
        that come meanwhile go on."""
        with self.turn():
            begun = [ticket for ticket in self.tickets.values() if ticket and ticket.submitted]
            for ticket in begun if mode == "abort" else ():
                self._abort(ticket)
        while mode == "wait" and not all(ticket.finished for ticket in begun):
            with self.turn():
                if self.engine.has_work:
                    self.engine.step()

    def drop(self, tickets: list[RequestGroup]) -> None:
        """Forget tickets, and end those that have not ended."""
        with self.turn():
            for ticket in tickets:
                self._drop(ticket)

    def _drop_leaving(self) -> None:
        while self._leaving:
            self._drop(self._leaving.popleft())

    def _drop(self, ticket: RequestGroup) -> None:
        if self.tickets.get(ticket.id) is not ticket:
            return  # dropped before; its id may be another's now
        if ticket.submitted and self._engine is not None:
            self._abort(ticket)
        del self.tickets[ticket.id]
        self._queued.pop(ticket.id, None)
        self._watches[0].forget(ticket.id)

    def close(self) -> None:
        """End all requests, and the engine."""
        with self.turn():
            if self._engine is not None and self._engine.warmup is not None:
                self._engine.warmup.stop()
            self.drop([ticket for ticket in self.tickets.values() if ticket is not None])
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()


def warm_idle(session: "weakref.ref[Session]", warmup: Warmup) -> bool:
    """Let a session's engine advance in its warm-up by a run; says whether it did. Without the session the
    warm-up ends."""
    found = session()
    if found is None:
        warmup.stop()
    return found is not None and found.warm()


def starter(session: Session) -> Callable[[Warmup], None]:
    """Begins a warm-up of a session's engine, and does not keep the session alive."""
    alive = weakref.ref(session)
    return lambda warmup: warmup.begin(partial(warm_idle, alive, warmup))


def listener(session: Session) -> Callable[[Request], None]:
    """Tells a session of its requests' ends, and does not keep it alive."""
    alive = weakref.ref(session)

    def on_end(request: Request) -> None:
        session = alive()
        if session is not None:
            session._ended(request)

    return on_end
