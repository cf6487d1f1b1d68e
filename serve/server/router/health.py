"""Health checks of the replicas."""

import asyncio
from collections.abc import Sequence

from ...host.streams import tell, warn
from ...kv.routing.placement import Replica
from ...options.router import RouterOptions
from ..routes.body import REALM
from ..service.errors import HttpError
from .http import ConnectionLost, HttpConnection, OutOfResources, ServerAddress
from .queue import RequestQueue

MISSES = 2  # failed checks after which a replica is lost
SHOWN = 12  # characters of a realm in the log


class Health:
    """Polls each replica. One that does not answer MISSES times is lost: its requests are resumed on other
    replicas. One that answers but is not ready, since it drains, keeps its requests."""

    def __init__(self, replicas: Sequence[Replica], line: RequestQueue, options: RouterOptions):
        self._line, self._options = line, options
        self._looks = [asyncio.create_task(self._watch(replica)) for replica in replicas]
        self._now = asyncio.get_running_loop().time
        self._since = self._now()  # when a replica last was up

    async def _watch(self, replica: Replica) -> None:
        missed = 0
        while True:
            try:
                status, realm = await self._probe(replica, "/ready")
                if status == 503:
                    status = 500 if (await self._probe(replica, "/health"))[0] != 200 else 503
            except OutOfResources as lacking:  # says nothing of the replica
                warn(f"no replica can be asked for its health now: {lacking}")
            else:
                missed = 0 if status in (200, 503) else missed + 1
                self._note(replica, status, realm, missed)
            await asyncio.sleep(self._options.health_period)

    def _note(self, replica: Replica, status: int, realm: str, missed: int) -> None:
        before = replica.is_up, replica.is_ready, replica.realm
        if not missed:
            replica.is_up, replica.is_ready, replica.realm = True, status == 200, realm
        elif missed >= MISSES and replica.is_up:
            replica.lose()
        if before != (replica.is_up, replica.is_ready, replica.realm):
            state = "ready" if replica.is_ready else "draining" if replica.is_up else "lost"
            tell(f"duetto: {replica} is {state}" + (f", of realm {realm[:SHOWN]}" if realm else ""))
        self._line.advance()
        self._fail_if_alone()

    def _fail_if_alone(self) -> None:
        now = self._now()
        if any(one.is_up for one in self._line.replicas):
            self._since = now
        elif now - self._since > self._options.replica_timeout:
            self._line.fail(HttpError(503, "no replica is there", "unavailable"))

    async def _probe(self, replica: Replica, path: str) -> tuple[int, str]:
        """Return the status of an open path, 0 after a timeout, and the realm that the answer names. Raises
        OutOfResources."""
        try:
            async with asyncio.timeout(self._options.health_timeout):
                return await status_of(replica, path)
        except OutOfResources:
            raise
        except (ConnectionLost, TimeoutError):
            return 0, ""

    def close(self) -> None:
        for look in self._looks:
            look.cancel()


async def status_of(replica: Replica, path: str) -> tuple[int, str]:
    connection = await HttpConnection.to(ServerAddress.of(replica.address))
    try:
        connection.send("GET", path, ())
        status = await connection.status()
        return status, dict(connection.headers).get(REALM.encode(), b"").decode("latin-1")
    finally:
        connection.abort()
