"""Serve's request router with the placement of `duetto route`.

Serve pickles this module by value, so it imports by absolute names.
"""

from importlib import import_module
from typing import Any

from duetto.ray.attempt import Attempt, rank_replicas
from duetto.serve.kv.routing.placement import Replica
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex

RequestRouter: Any = import_module("ray.serve.request_router").RequestRouter


class PrefixAffinityRouter(RequestRouter):
    """Router that sends a prompt to the best replica by its cached prefix and its load.

    An answer that has begun goes to a replica of its realm. A request without an Attempt goes to any replica.
    """

    def initialize_state(self, cache_pages: int) -> None:
        """Set the number of prompt pages that each replica is assumed to have cached."""
        self._cache_pages = cache_pages
        self._known: dict[Any, Replica] = {}

    def update_replicas(self, replicas: list[Any]) -> None:
        self._known = {running.replica_id: self._known_replica(running) for running in replicas}
        super().update_replicas(replicas)

    def _known_replica(self, running: Any) -> Replica:
        if (replica := self._known.get(running.replica_id)) is None:
            replica = Replica(str(running.replica_id), AssumedPrefixIndex(self._cache_pages))
            replica.realm = getattr(running, "replica_metadata", {}).get("realm", "")
            replica.is_up = replica.is_ready = True
        return replica

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the replicas to ask in this order, each in a list of one. A replica without room passes to
        the next."""
        pending_request.routing_context.should_backoff = True
        attempt = attempt_argument(pending_request)
        if attempt is None:
            return [candidate_replicas]
        running = {self._known[candidate.replica_id]: candidate for candidate in candidate_replicas}
        max_requests = max(candidate.max_ongoing_requests for candidate in candidate_replicas)
        chosen = rank_replicas(list(running), attempt.routed_request, max_requests)
        if chosen:
            attempt.assign_replica(chosen[0])
        return [[running[replica]] for replica in chosen]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Correct the count of requests if another replica than the best has taken it."""
        attempt, replica = attempt_argument(pending_request), self._known.get(replica_id)
        if attempt is not None and replica is not None and replica is not attempt.replica:
            attempt.assign_replica(replica)


def attempt_argument(pending_request: Any) -> Attempt | None:
    """Return the Attempt among a request's arguments, or None."""
    last = pending_request.args[-1] if pending_request.args else None
    return last if isinstance(last, Attempt) else None
