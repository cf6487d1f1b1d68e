"""Clients: each sends one request after the other, and compares its answer with the oracle's."""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.soak.answers import Answer
from benchmarks.soak.asks import Ask
from benchmarks.soak.fleet import ROUTERS, SERVICES, Fleet
from benchmarks.soak.oracle import Wanted

WAYS = {"read": 52, "whole": 26, "slow": 8, "left": 9, "reset": 5}  # how an answer is read, and weights
CUT = ("left", "reset")
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: close by a reset
PATIENCE = 180.0  # seconds; then a request is lost
AGAIN = 0.3  # seconds until a client asks a router again that was killed


class Refused(Exception):
    """An answer is an error, or ends before it is whole."""


class FirstToken(NamedTuple):
    """The time to the first token of a stream. at: seconds of the run; seconds: from the request on."""

    at: float
    service: str
    seconds: float


@dataclass
class Attempt:
    """A request of one client, and its answer so far.

    events: number of events after which the client disconnects; None if it reads all
    """

    ask: Ask
    way: str
    service: str
    begun: float
    events: int | None
    answer: Answer = field(default_factory=Answer)
    first: float | None = None


def connections() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    return httpx.AsyncClient(timeout=PATIENCE, limits=limits)


@dataclass
class Clients:
    """The load: a number of clients, each of which thinks for some time before each request.

    failures: file of wrong and lost answers
    think: mean seconds
    done: counts of answers by their verdict; kinds: of right ones by kind
    joined: answers whose tokens follow from two sets of weights, for the audit logs to prove
    begun: time at which the load began
    """

    fleet: Fleet
    asks: Sequence[Ask]
    wanted: Wanted
    failures: Path
    seed: int = 0
    think: float = 1.5
    done: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    joined: list[Answer] = field(default_factory=list)
    firsts: list[FirstToken] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    http: httpx.AsyncClient = field(default_factory=connections)

    async def run(self, count: int, until: float) -> None:
        """Send requests until a time, and wait for their answers."""
        self.begun = time.monotonic()
        await asyncio.gather(*(self._client(number, until) for number in range(count)))
        await self.http.aclose()

    async def _client(self, number: int, until: float) -> None:
        chance = random.Random(f"{self.seed} client {number}")
        await asyncio.sleep(self.think * chance.random())
        while time.monotonic() < until:
            await self.judge(self._drawn(chance))
            await asyncio.sleep(chance.expovariate(1 / self.think))

    def _drawn(self, chance: random.Random) -> Attempt:
        ask, (way,) = chance.choice(self.asks), chance.choices([*WAYS], [*WAYS.values()])
        service = "adapters" if ask.has_adapter else chance.choice([*SERVICES])
        events = chance.randrange(30) if way in CUT else None
        return Attempt(ask, way, service, time.monotonic(), events)

    async def judge(self, attempt: Attempt) -> None:
        """Send a request, compare its answer with the oracle's, and count it."""
        ask, way = attempt.ask, attempt.way
        allowed, error = self.fleet.allowed, await self._answered(attempt)
        allowed |= self.fleet.allowed
        if error:
            return self._fail("lost", attempt, allowed, error)
        if not any(fits(attempt, self.wanted[weights][ask.number]) for weights in allowed):
            if len(allowed) < 2:
                return self._fail("wrong", attempt, allowed, "")
            self.joined.append(attempt.answer)
        self.done["cut" if way in CUT else "answers"] += 1
        self.kinds[ask.kind] += 1
        if attempt.first is not None:
            seconds = attempt.first - attempt.begun
            self.firsts.append(FirstToken(attempt.first - self.begun, attempt.service, seconds))

    async def _answered(self, attempt: Attempt) -> str:
        """Ask until there is an answer; return an error if the request is lost. It is sent again if its
        router was killed."""
        router = self.fleet.servers[ROUTERS[attempt.service]]
        while True:
            life, attempt.answer = router.life, Answer()
            try:
                await self._read(attempt)
                return ""
            except (httpx.HTTPError, Refused) as error:
                was_killed = router.life != life or not router.is_up
                if not was_killed or time.monotonic() - attempt.begun > PATIENCE:
                    return f"{type(error).__name__}: {error}"
            self.done["sent again"] += 1
            await asyncio.sleep(AGAIN)

    async def _read(self, attempt: Attempt) -> None:
        """Send a request and read its answer. Raises Refused and httpx.HTTPError."""
        ask = attempt.ask
        url, body = self.fleet.url(attempt.service) + ask.path, ask.body | {"stream": attempt.way != "whole"}
        async with self.http.stream("POST", url, json=body) as reply:
            if reply.status_code != 200:
                raise Refused(f"{reply.status_code} {(await reply.aread()).decode(errors='replace')}")
            if attempt.way == "whole":
                return attempt.answer.take(json.loads(await reply.aread()))
            await self._read_stream(reply, attempt)

    async def _read_stream(self, reply: httpx.Response, attempt: Attempt) -> None:
        events = 0
        async for line in reply.aiter_lines():
            if attempt.events is not None and events >= attempt.events:
                return reset(reply) if attempt.way == "reset" else None
            if line == "data: [DONE]":
                return
            if line.startswith("data: {"):
                events += 1
                take(attempt, json.loads(line[6:]))
            if attempt.way == "slow":
                await asyncio.sleep(0.01)
        raise Refused("the stream has ended before its last event")

    def _fail(self, verdict: str, attempt: Attempt, allowed: frozenset[str], error: str) -> None:
        """Count a failure, and write it with all that is needed to replay it alone."""
        self.done[verdict] += 1
        ask = attempt.ask
        record: dict[str, Any] = {
            "verdict": verdict, "at": round(time.monotonic() - self.begun, 2), "error": error,
            "way": attempt.way, "service": attempt.service, "kind": ask.kind, "path": ask.path,
            "body": ask.body, "found": attempt.answer.record(),
            "wanted": {weights: self.wanted[weights][ask.number].record() for weights in sorted(allowed)},
        }  # fmt: skip
        with self.failures.open("a") as file:
            file.write(json.dumps(record) + "\n")


def take(attempt: Attempt, event: dict[str, Any]) -> None:
    """Append an event to an answer. Raises Refused for an error."""
    if "error" in event:
        raise Refused(json.dumps(event["error"]))
    if attempt.first is None and event.get("choices"):
        attempt.first = time.monotonic()
    attempt.answer.take(event)


def fits(attempt: Attempt, wanted: Answer) -> bool:
    found = attempt.answer
    return found.begins(wanted) if attempt.way in CUT else found == wanted


def reset(reply: httpx.Response) -> None:
    """Let the connection be closed by a reset."""
    with suppress(KeyError, OSError):
        own: socket.socket = reply.extensions["network_stream"].get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
