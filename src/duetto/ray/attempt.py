"""Attempts to send a request to a replica that Serve's request router chooses."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..serve.kv.routing.placement import Replica, RoutedRequest, choose_replica, replicas_of_realm


class Attempt:
    """Attempt to send a request. A proxy uses it like the replica that it sends a request to.

    It is an argument of the call, in which the request router finds the prompt. Replicas receive None for it.

    routed_request: the request.
    replica: chosen by the request router, in whose event loop all accounting runs.
    """

    def __init__(self, routed_request: RoutedRequest):
        self.routed_request = routed_request
        self.replica: Replica | None = None
        self.connections: dict[Any, None] = {}
        self.address, self.is_ready = "a replica", True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False

    def __str__(self) -> str:
        return self.address

    def __reduce__(self):
        return type(None), ()

    def assign_replica(self, replica: Replica) -> None:
        """Count the request for `replica`, and no longer for the replica before."""
        self._loop = asyncio.get_running_loop()
        if self.replica is not None:
            self.replica.remove_request(self.routed_request)
        self.replica = replica
        if not self._is_over:
            replica.add_request(self.routed_request)

    def suspect(self) -> None:
        """Do nothing, because Serve checks its replicas itself."""

    def on_prefill_done(self, routed_request: RoutedRequest) -> None:
        """Note that the answer has begun. Called in any event loop."""
        self._run_in_router(lambda replica: replica.on_prefill_done(routed_request))

    def release_replica(self) -> None:
        """Stop counting the request. Called in any event loop."""
        self._is_over = True
        self._run_in_router(lambda replica: replica.remove_request(self.routed_request))

    def _run_in_router(self, work: Callable[[Replica], None]) -> None:
        if self._loop is not None and self.replica is not None:
            self._loop.call_soon_threadsafe(work, self.replica)


def rank_replicas(
    replicas: Sequence[Replica], routed_request: RoutedRequest, max_requests: int
) -> list[Replica]:
    """Return the replicas that may have a request, the best first; none if all have `max_requests` requests.

    Leaves out replicas that have refused it. If all have, they are asked again, and the ingress gives up
    then.
    """
    attempts: Any = routed_request.failed_replicas  # Attempts
    refused = {attempt.replica for attempt in attempts}
    able = [replica for replica in replicas if replica not in refused] or replicas
    first = choose_replica(
        replicas_of_realm(able, routed_request.realm, ()), routed_request.prompt, max_requests, ()
    )
    return [] if first is None else [first, *(replica for replica in able if replica is not first)]
