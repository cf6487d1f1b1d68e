"""Requests that wait for a replica: their order, the choice of the replica, and of a prefill engine."""

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...kv.routing.placement import Replica, RoutedRequest, best, fitting
from ...options.server import ServerOptions
from ..routes.body import SOURCE
from ..service.errors import HttpError
from ..service.fair_queue import FairQueue
from .http import Headers


@dataclass(order=True)
class QueuedRequest:
    """A request that waits.

    line: position by its client's share; smaller ones go first
    number: order of arrival
    seat: future of its replica
    """

    line: int
    number: int
    job: RoutedRequest = field(compare=False)
    seat: "asyncio.Future[Replica]" = field(compare=False)


class RequestQueue:
    """Assigns requests to replicas, each with at most `most` at a time. Waiting requests go in the order of
    their clients' shares, as in `serve/server/service/fair_queue.py`."""

    def __init__(self, replicas: Sequence[Replica], most: int, options: ServerOptions, choose=best):
        self.replicas, self._most, self._options, self._choose = replicas, most, options, choose
        self._places: list[QueuedRequest] = []
        self._shares, self._numbers = FairQueue(), itertools.count()

    @property
    def waiting(self) -> int:
        return sum(not place.seat.done() for place in self._places)

    def place(self, client: str, tokens: int) -> int:
        """Return the position of a request that may cost up to `tokens`. All requests without a client share
        one."""
        return self._shares.place(client, tokens) if client else 0

    async def replica(self, job: RoutedRequest, line: int) -> Replica:
        """Wait for the replica of a job. Raises HttpError if too many requests wait, after the timeout, and
        if all replicas have rejected the job."""
        if self._is_refused(job):
            raise unavailable()
        if self.waiting >= self._options.max_queued and not job.left:
            raise HttpError(429, f"{self.waiting} requests wait already", "too_many_requests")
        place = QueuedRequest(line, next(self._numbers), job, asyncio.get_running_loop().create_future())
        heapq.heappush(self._places, place)
        self.advance()
        try:
            return await asyncio.wait_for(place.seat, self._options.queue_timeout)
        except TimeoutError:
            reason = f"no replica was free within {self._options.queue_timeout:g} s"
            raise HttpError(503, reason, "max_wait") from None
        except asyncio.CancelledError:
            if place.seat.done() and not place.seat.cancelled() and place.seat.exception() is None:
                self.leave(place.seat.result(), job)  # assigned at the same moment
            raise

    def advance(self) -> None:
        """Assign waiting requests in order, as far as replicas have room."""
        waiting: list[QueuedRequest] = []
        while self._places:
            place = heapq.heappop(self._places)
            if place.seat.done():
                continue
            open = fitting(self.replicas, place.job.realm, place.job.left)
            found = self._choose(open, place.job.prompt, self._most, place.job.left)
            if found is None and not place.job.others and self._is_refused(place.job):
                place.seat.set_exception(unavailable())
                continue
            if found is None:
                waiting.append(place)
                if not (place.job.left or place.job.realm):
                    break  # no request behind it has more to choose from
                continue
            found.take(place.job)
            self._shares.served(place.line)
            place.seat.set_result(found)
        for place in waiting:
            heapq.heappush(self._places, place)

    def _is_refused(self, job: RoutedRequest) -> bool:
        """Return whether all replicas that could serve a job have rejected it. After a broken connection a
        replica is up, and may be ready at its next health check. A job refused for its realm does not
        wait for it."""
        able = [one for one in self.replicas if one.is_ready or (one.is_up and not job.others)]
        return bool(able) and job.left.issuperset(able)

    def leave(self, replica: Replica, job: RoutedRequest) -> None:
        """Release the replica of a job."""
        replica.leave(job)
        self.advance()

    def fail(self, error: HttpError) -> None:
        for place in self._places:
            if not place.seat.done():
                place.seat.set_exception(error)
        self._places.clear()


def unavailable() -> HttpError:
    return HttpError(503, "no replica could serve the request", "unavailable")


class PrefillPool:
    """Prefill engines of a service, by the addresses at which decode engines reach them. The replica that
    answers is told the best engine for the prompt, chosen as replicas are."""

    def __init__(self, addresses: Mapping[Replica, str], most: int):
        self.replicas, self._most = list(addresses), most
        self._headers = {one: [(SOURCE.encode(), place.encode())] for one, place in addresses.items()}

    @contextmanager
    def beside(self, job: RoutedRequest) -> Iterator[Headers]:
        """Yield the headers that name the prefill engine of a job, and hold it until the block ends. Empty if
        the replica caches all full pages of the prompt or no engine is free: then the replica chooses an
        engine itself, or prefills locally."""
        chosen = best(self.replicas, job.prompt, self._most, ()) if job.work >= job.prompt.page else None
        if chosen is None:
            yield []
            return
        own = RoutedRequest(job.prompt)
        chosen.take(own)
        try:
            yield self._headers[chosen]
        finally:
            chosen.leave(own)
