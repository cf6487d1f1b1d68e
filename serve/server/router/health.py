"""Health checks of the replicas."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ...host.streams import print_stderr, warn_once
from ...kv.routing.placement import Replica
from ...options.router import RouterOptions
from ..routes.body import REALM_HEADER
from ..service.errors import HttpError
from .http_client import ConnectionLost, HttpConnection, OutOfResources, ServerAddress
from .request_queue import RequestQueue

MAX_MISSES = 2  # failed checks after which a replica is lost
LOGGED_REALM_CHARS = 12  # characters of a realm that are logged


class HealthChecker:
    """Checks the health of each replica periodically, and at once after a broken connection.

    A replica is lost after `MAX_MISSES` failed checks; a broken connection counts as one. Only checks decide
    this, since a client's request may break a connection too. Requests of a lost replica are resumed on other
    replicas. A replica that answers but is not ready is draining: it keeps its requests.
    """

    def __init__(self, replicas: Sequence[Replica], queue: RequestQueue, options: RouterOptions):
        self._queue, self._options = queue, options
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in replicas]
        self._now = asyncio.get_running_loop().time
        self._last_up = self._now()  # when a replica last was up

    async def _watch(self, replica: Replica) -> None:
        missed = 0
        while True:
            try:
                status, realm = await self._probe(replica, "/ready")
                if status == 503:
                    status = 500 if (await self._probe(replica, "/health"))[0] != 200 else 503
            except OutOfResources as lacking:  # a fault of this process, not of the replica
                warn_once(f"no replica can be asked for its health now: {lacking}")
                await asyncio.sleep(self._options.health_period)
            else:
                missed = 0 if status in (200, 503) else missed + 1 + replica.is_suspect
                replica.suspicion.clear()
                self._apply_check(replica, status, realm, missed)
                await self._wait_next_check(replica)

    async def _wait_next_check(self, replica: Replica) -> None:
        """Wait until the next check of a replica is due."""
        with suppress(TimeoutError):
            await asyncio.wait_for(replica.suspicion.wait(), self._options.health_period)

    def _apply_check(self, replica: Replica, status: int, realm: str, missed: int) -> None:
        old_state = replica.is_up, replica.is_ready, replica.realm
        if not missed:
            replica.is_up, replica.is_ready, replica.realm = True, status == 200, realm
        elif missed >= MAX_MISSES and replica.is_up:
            replica.mark_down()
        if old_state != (replica.is_up, replica.is_ready, replica.realm):
            state = "ready" if replica.is_ready else "draining" if replica.is_up else "lost"
            print_stderr(
                f"duetto: {replica} is {state}"
                + (f", of realm {realm[:LOGGED_REALM_CHARS]}" if realm else "")
            )
        self._queue.assign_waiting()
        self._fail_if_all_lost()

    def _fail_if_all_lost(self) -> None:
        now = self._now()
        if any(replica.is_up for replica in self._queue.replicas):
            self._last_up = now
        elif now - self._last_up > self._options.replica_timeout:
            self._queue.fail_all(HttpError(503, "no replica is there", "unavailable"))

    async def _probe(self, replica: Replica, path: str) -> tuple[int, str]:
        """Request a path that needs no key. Returns the status (0 after a timeout or a lost connection) and
        the realm that the answer names. Raises OutOfResources."""
        try:
            async with asyncio.timeout(self._options.health_timeout):
                return await fetch_status(replica, path)
        except OutOfResources:
            raise
        except (ConnectionLost, TimeoutError):
            return 0, ""

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


async def fetch_status(replica: Replica, path: str) -> tuple[int, str]:
    connection = await HttpConnection.connect(ServerAddress.from_url(replica.address))
    try:
        connection.send("GET", path, ())
        status = await connection.read_status()
        return status, dict(connection.headers).get(REALM_HEADER.encode(), b"").decode("latin-1")
    finally:
        connection.abort()
