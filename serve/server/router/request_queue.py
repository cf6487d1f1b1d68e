"""Queue of requests that wait for a replica, and the choice of replicas and prefill engines."""

import asyncio
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...kv.routing.placement import Replica, RoutedRequest, choose_replica, replicas_of_realm
from ...options.server import ServerOptions
from ..routes.body import SOURCE_HEADER
from ..service.errors import HttpError
from ..service.fair_queue import FairQueue
from .http_client import Headers


@dataclass(order=True)
class QueuedRequest:
    """A request that waits for a replica.

    position: position by its client's share; smaller goes first
    arrival: order of arrival
    routed_request: the request
    assignment: future of its replica
    """

    position: int
    arrival: int
    routed_request: RoutedRequest = field(compare=False)
    assignment: "asyncio.Future[Replica]" = field(compare=False)


class RequestQueue:
    """Assigns requests to replicas, each of which runs at most `max_in_flight` at a time. Waiting requests
    are ordered by their clients' shares, as in `serve/server/service/fair_queue.py`."""

    def __init__(
        self, replicas: Sequence[Replica], max_in_flight: int, options: ServerOptions, choose=choose_replica
    ):
        self.replicas, self._max_in_flight = replicas, max_in_flight
        self._options, self._choose = options, choose
        self._queued: list[QueuedRequest] = []
        self._fair_queue, self._arrivals = FairQueue(), itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not queued.assignment.done() for queued in self._queued)

    def assign_position(self, client: str, tokens: int) -> int:
        """Return the position of a request that may cost up to `tokens`. Requests without a client all have
        position 0."""
        return self._fair_queue.assign_position(client, tokens) if client else 0

    async def assign_replica(self, routed_request: RoutedRequest, position: int) -> Replica:
        """Wait for the replica of a request at position `position`. Raises HttpError if too many requests
        wait, after the timeout, and if all replicas have rejected the request."""
        if self._is_refused(routed_request):
            raise unavailable_error()
        if self.num_waiting >= self._options.max_queued and not routed_request.failed_replicas:
            raise HttpError(429, f"{self.num_waiting} requests wait already", "too_many_requests")
        queued = QueuedRequest(
            position, next(self._arrivals), routed_request, asyncio.get_running_loop().create_future()
        )
        heapq.heappush(self._queued, queued)
        self.assign_waiting()
        try:
            return await asyncio.wait_for(queued.assignment, self._options.queue_timeout)
        except TimeoutError:
            reason = f"no replica was free within {self._options.queue_timeout:g} s"
            raise HttpError(503, reason, "max_wait") from None
        except asyncio.CancelledError:
            if (
                queued.assignment.done()
                and not queued.assignment.cancelled()
                and queued.assignment.exception() is None
            ):
                self.release(queued.assignment.result(), routed_request)  # assigned at the same moment
            raise

    def assign_waiting(self) -> None:
        """Assign waiting requests in order, as far as replicas have room."""
        waiting: list[QueuedRequest] = []
        while self._queued:
            queued = heapq.heappop(self._queued)
            if queued.assignment.done():
                continue
            exclusions = queued.routed_request.excluded_replicas
            candidates = replicas_of_realm(self.replicas, queued.routed_request.realm, exclusions)
            replica = self._choose(candidates, queued.routed_request.prompt, self._max_in_flight, exclusions)
            if replica is None and self._is_refused(queued.routed_request):
                queued.assignment.set_exception(unavailable_error())
                continue
            if replica is None:
                waiting.append(queued)
                if not (exclusions or queued.routed_request.realm):
                    break  # no request behind it has more to choose from
                continue
            replica.add_request(queued.routed_request)
            self._fair_queue.on_served(queued.position)
            queued.assignment.set_result(replica)
        for queued in waiting:
            heapq.heappush(self._queued, queued)

    def _is_refused(self, routed_request: RoutedRequest) -> bool:
        """Return whether all replicas that could serve a request have rejected it. A replica that is up may
        become ready at its next health check, and counts. A request that was refused for its realm does not
        wait for that."""
        able = [
            replica
            for replica in self.replicas
            if replica.is_ready or (replica.is_up and not routed_request.mismatched_replicas)
        ]
        return bool(able) and routed_request.failed_replicas.issuperset(able)

    def release(self, replica: Replica, routed_request: RoutedRequest) -> None:
        """Release the replica of a request."""
        replica.remove_request(routed_request)
        self.assign_waiting()

    def fail_all(self, error: HttpError) -> None:
        for queued in self._queued:
            if not queued.assignment.done():
                queued.assignment.set_exception(error)
        self._queued.clear()


def unavailable_error() -> HttpError:
    return HttpError(503, "no replica could serve the request", "unavailable")


class PrefillPool:
    """Prefill engines of a service, with the addresses at which decode engines reach them. The best engine
    for a prompt is chosen as replicas are; the answering replica gets its address."""

    def __init__(self, addresses: Mapping[Replica, str], max_in_flight: int):
        self.replicas, self._max_in_flight = list(addresses), max_in_flight
        self._headers = {
            replica: [(SOURCE_HEADER.encode(), address.encode())] for replica, address in addresses.items()
        }

    @contextmanager
    def reserve_prefill_engine(self, routed_request: RoutedRequest) -> Iterator[Headers]:
        """Choose a prefill engine for a request, yield the headers that name it, and release it after the
        block. The headers are empty if the replica caches all full pages of the prompt, or if no engine is
        free. The replica then chooses an engine itself, or prefills locally."""
        replica = (
            choose_replica(self.replicas, routed_request.prompt, self._max_in_flight, ())
            if routed_request.prefill_tokens >= routed_request.prompt.page_size
            else None
        )
        if replica is None:
            yield []
            return
        prefill = RoutedRequest(routed_request.prompt)
        replica.add_request(prefill)
        try:
            yield self._headers[replica]
        finally:
            replica.remove_request(prefill)
