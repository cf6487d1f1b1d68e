"""The line of requests that wait for a replica: whose turn it is, and where it goes."""

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...kv.routing.placement import Replica, RoutedRequest, best
from ...options.server import ServerOptions
from ..routes.body import SOURCE
from ..service.errors import HttpError
from ..service.fair_queue import FairQueue
from .http import Headers


@dataclass(order=True)
class QueuedRequest:
    """In the line; `line` is by its client's share, `number` by arrival."""

    line: int
    number: int
    job: RoutedRequest = field(compare=False)
    seat: "asyncio.Future[Replica]" = field(compare=False)


class RequestQueue:
    """Deals requests to replicas, each of which has at most so many at a time; those that wait do so in the
    order of their clients' shares, as in `serve/server/service/fair_queue.py`."""

    def __init__(self, replicas: Sequence[Replica], most: int, options: ServerOptions, choose=best):
        self.replicas, self._most, self._options, self._choose = replicas, most, options, choose
        self._places: list[QueuedRequest] = []
        self._shares, self._numbers = FairQueue(), itertools.count()

    @property
    def waiting(self) -> int:
        return sum(not place.seat.done() for place in self._places)

    def place(self, client: str, tokens: int) -> int:
        """In the line, of a request that may cost so many tokens; without a client it is of one with all
        others."""
        return self._shares.place(client, tokens) if client else 0

    async def replica(self, job: RoutedRequest, line: int) -> Replica:
        """The replica that a job has from now on, when it is its turn. Raises HttpError where too many wait,
        or for too long, and where all replicas have refused it."""
        ready = [one for one in self.replicas if one.is_ready]
        if ready and job.left.issuperset(ready):
            raise HttpError(503, "no replica could serve the request", "unavailable")
        if self.waiting >= self._options.max_queued and not job.left:
            raise HttpError(429, f"{self.waiting} requests wait already", "too_many_requests")
        place = QueuedRequest(line, next(self._numbers), job, asyncio.get_running_loop().create_future())
        heapq.heappush(self._places, place)
        self.advance()
        try:
            return await asyncio.wait_for(place.seat, self._options.max_wait)
        except TimeoutError:
            reason = f"no replica was free within {self._options.max_wait:g} s"
            raise HttpError(503, reason, "max_wait") from None
        except asyncio.CancelledError:
            if place.seat.done() and not place.seat.cancelled() and place.seat.exception() is None:
                self.leave(place.seat.result(), job)  # it had got one at the same moment
            raise

    def advance(self) -> None:
        """Seat those whose turn it is, as far as there is room."""
        waiting: list[QueuedRequest] = []
        while self._places:
            place = heapq.heappop(self._places)
            if place.seat.done():
                continue
            found = self._choose(self._fitting(place.job), place.job.prompt, self._most, place.job.left)
            if found is None:
                waiting.append(place)
                if not (place.job.left or place.job.realm):
                    break  # nobody behind it has more to choose from
                continue
            found.take(place.job)
            self._shares.served(place.line)
            place.seat.set_result(found)
        for place in waiting:
            heapq.heappush(self._places, place)

    def _fitting(self, job: RoutedRequest) -> Sequence[Replica]:
        """Replicas that are known to go on with an answer that has begun; all where there are none, since
        what is known may be old."""
        if not job.realm:
            return self.replicas
        open = [one for one in self.replicas if one.is_ready and one not in job.left]
        return [one for one in open if one.realm == job.realm] or self.replicas

    def leave(self, replica: Replica, job: RoutedRequest) -> None:
        """A replica is done with a job."""
        replica.leave(job)
        self.advance()

    def fail(self, error: HttpError) -> None:
        """Nobody who waits will get a replica."""
        for place in self._places:
            if not place.seat.done():
                place.seat.set_exception(error)
        self._places.clear()


class PrefillPool:
    """The prefill engines of a service, and the addresses at which those that decode ask them. The replica
    that answers a request is told which one: the best for its prompt, as replicas are chosen."""

    def __init__(self, addresses: Mapping[Replica, str], most: int):
        self.replicas, self._most = list(addresses), most
        self._headers = {one: [(SOURCE.encode(), place.encode())] for one, place in addresses.items()}

    @contextmanager
    def beside(self, job: RoutedRequest) -> Iterator[Headers]:
        """What tells the replica that has a job who computes its prompt; the block ends when that is
        computed. Nothing where it has all full pages, and where no engine is free: then it asks whom it
        likes, or computes."""
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
