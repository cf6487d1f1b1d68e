"""A request on its way to a replica that Serve's request router chooses."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..serve.kv.routing.placement import Replica, RoutedRequest, best, fitting


class Attempt:
    """Sending of a request, in place of the replica that a proxy sends it to. The request router finds the
    prompt in it, since it is an argument of the call. Replicas get None for it.

    replica: chosen by the request router, in whose event loop all accounting runs.
    """

    def __init__(self, job: RoutedRequest):
        self.job = job
        self.replica: Replica | None = None
        self.connections: dict[Any, None] = {}
        self.address, self.is_ready = "a replica", True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False

    def __str__(self) -> str:
        return self.address

    def __reduce__(self):
        return type(None), ()

    def place(self, replica: Replica) -> None:
        """Count the request as one of `replica`, and no longer as one of the replica before."""
        self._loop = asyncio.get_running_loop()
        if self.replica is not None:
            self.replica.leave(self.job)
        self.replica = replica
        if not self._is_over:
            replica.take(self.job)

    def begun(self, job: RoutedRequest) -> None:
        self._in_router(lambda replica: replica.begun(job))

    def leave(self) -> None:
        """Count the request no more. Called in any event loop."""
        self._is_over = True
        self._in_router(lambda replica: replica.leave(self.job))

    def _in_router(self, work: Callable[[Replica], None]) -> None:
        if self._loop is not None and self.replica is not None:
            self._loop.call_soon_threadsafe(work, self.replica)


def ranked(replicas: Sequence[Replica], job: RoutedRequest, most: int) -> list[Replica]:
    """Return the best replica for a job, then the others that may have it; none if all have `most` requests.
    Leaves out those that have refused it. If all have, they are asked again, which the ingress notices."""
    left: Any = job.left  # Attempts
    refused = {attempt.replica for attempt in left}
    able = [one for one in replicas if one not in refused] or replicas
    first = best(fitting(able, job.realm, ()), job.prompt, most, ())
    return [] if first is None else [first, *(one for one in able if one is not first)]
