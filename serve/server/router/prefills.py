"""Replicas that compute prompts for those that answer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ...kv.routing.placement import Replica, RoutedRequest, best
from ..routes.body import SOURCE
from .http import Headers


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
