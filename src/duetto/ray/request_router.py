"""Serve's request router with the placement of `duetto route`. Serve pickles this module by value: it imports
what it needs by name."""

from importlib import import_module
from typing import Any

from duetto.ray.attempt import Attempt, ranked
from duetto.serve.kv.routing.placement import Replica
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex

RequestRouter: Any = import_module("ray.serve.request_router").RequestRouter


class PrefixAffinityRouter(RequestRouter):
    """Sends a prompt to the replica that would have computed it first, by its cached prefix and its load. An
    answer that has begun goes to a replica of its realm. Requests that carry no Attempt go to any replica."""

    def initialize_state(self, cache_pages: int) -> None:
        """cache_pages: of prompts, that each replica is assumed to have cached."""
        self._cache_pages = cache_pages
        self._known: dict[Any, Replica] = {}

    def update_replicas(self, replicas: list[Any]) -> None:
        self._known = {one.replica_id: self._replica(one) for one in replicas}
        super().update_replicas(replicas)

    def _replica(self, running: Any) -> Replica:
        if (found := self._known.get(running.replica_id)) is None:
            found = Replica(str(running.replica_id), AssumedPrefixIndex(self._cache_pages))
            found.realm = getattr(running, "replica_metadata", {}).get("realm", "")
            found.is_up = found.is_ready = True
        return found

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return a rank for each replica, the best first. The others are asked if it has no room."""
        pending_request.routing_context.should_backoff = True
        found = attempt_of(pending_request)
        if found is None:
            return [candidate_replicas]
        running = {self._known[one.replica_id]: one for one in candidate_replicas}
        most = max(one.max_ongoing_requests for one in candidate_replicas)
        chosen = ranked(list(running), found.job, most)
        if chosen:
            found.place(chosen[0])
        return [[running[one]] for one in chosen]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Correct the count if the best replica had no room."""
        found, replica = attempt_of(pending_request), self._known.get(replica_id)
        if found is not None and replica is not None and replica is not found.replica:
            found.place(replica)


def attempt_of(pending_request: Any) -> Attempt | None:
    last = pending_request.args[-1] if pending_request.args else None
    return last if isinstance(last, Attempt) else None
