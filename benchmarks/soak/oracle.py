"""The oracle: each request alone in a server of its own, with each set of weights."""

from collections.abc import Mapping, Sequence

from benchmarks.soak.answers import Answer
from benchmarks.soak.asks import Ask
from benchmarks.soak.fleet import CHANGE, Fleet
from benchmarks.soak.models import WEIGHTS

Wanted = Mapping[str, Sequence[Answer]]  # by weights, then by the request's number


async def alone(fleet: Fleet, asks: Sequence[Ask]) -> Wanted:
    """Return the answers to requests that are sent one after the other to a server without faults."""
    server, found = fleet.server("reference", fleet.reference), {}
    await server.start(fleet.http)
    try:
        for weights in WEIGHTS:
            body = {"path": weights, "mode": "wait"}
            reply = await fleet.http.post(f"{server.url}/update_weights", json=body)
            reply.raise_for_status()
            found[weights] = [await answered(fleet, server.url, ask) for ask in asks]
    finally:
        await server.stop()
    return found


async def answered(fleet: Fleet, url: str, ask: Ask) -> Answer:
    reply = await fleet.http.post(url + ask.path, json=ask.body, timeout=CHANGE)
    if reply.status_code != 200:
        raise RuntimeError(f"{ask.kind}: {reply.status_code} {reply.text}")
    answer = Answer()
    answer.take(reply.json())
    return answer
