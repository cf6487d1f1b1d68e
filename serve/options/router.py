"""Which servers a router stands in front of, and what it does where one is lost."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...fields import knob
from ...refusals import shown

REPLICA = re.compile(r"https?://[^/?#@=\s]+/?")
ADDRESS = re.compile(r"\S+:\d{1,5}")
EVENTS = re.compile(r"(tcp|ipc)://\S+")


@dataclass(frozen=True)
class RouterOptions:
    """The replicas of a service, and how requests are dealt to them. Raises ValueError for what is not
    allowed."""

    replica: Sequence[str] = knob((), "address of a server, as http://host:8000; repeatable")
    prefill: Sequence[str] = knob(
        (), "address of a server that computes prompts for the replicas, and the kv_address where they ask "
        "it, as http://host:8001=host:14579; repeatable",
    )  # fmt: skip
    tokenizer: str | None = knob(
        None, "folder of the replicas' tokenizer: pages are named by tokens then, as the replicas name them; "
        "default: by the letters of the text",
    )  # fmt: skip
    kv_events: Sequence[str] | None = knob(
        None, "where a replica tells of its pages, as tcp://host:5557; one for each replica in their order, "
        "then for each prefill; needs tokenizer and page_size; default: what was sent is thought to be there",
    )  # fmt: skip
    page_size: int = knob(64, "tokens of a page, as the replicas have it")
    cache_tokens: int = knob(1 << 18, "tokens that a replica's cache is thought to hold without kv_events")
    max_in_flight: int = knob(64, "requests of a replica at a time; others wait here")
    attempts: int = knob(3, "replicas that a request is sent to at most, one after the other")
    resume: bool = knob(
        True, "let answers of a replica that is lost go on in another; only for duetto's servers"
    )
    health_period: float = knob(1.0, "seconds between looks at a replica's health")
    health_timeout: float = knob(5.0, "seconds that its answer may take; a replica that misses two is lost")
    max_absence: float = knob(
        30.0, "seconds that requests wait while no replica is there; then they end with 503"
    )

    def __post_init__(self):
        if not self.replica:
            raise ValueError("replica is missing: the address of a server, as http://host:8000")
        for url in self.replica:
            if not REPLICA.fullmatch(url):
                raise ValueError(f"replica {shown(url)} is not allowed: http[s]://host[:port]")
        for pair in self.prefill:
            url, _, address = pair.partition("=")
            if not REPLICA.fullmatch(url) or not ADDRESS.fullmatch(address):
                raise ValueError(f"prefill {shown(pair)} is not allowed: http[s]://host[:port]=host:port")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError(f"replica {shown(self.servers)} is not allowed: each has another address")
        self._check_events()
        for name in ("page_size", "cache_tokens", "max_in_flight", "attempts", "health_period",
                     "health_timeout", "max_absence"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {shown(getattr(self, name))} is not allowed: more than 0")

    @property
    def servers(self) -> list[str]:
        """All of them: those that answer, then those that prefill."""
        return [*self.replica, *(pair.partition("=")[0] for pair in self.prefill)]

    def _check_events(self) -> None:
        if self.kv_events is None:
            return
        if len(self.kv_events) != len(self.servers):
            told = f"{len(self.kv_events)} for {len(self.servers)} replicas"
            raise ValueError(f"kv_events is not allowed {told}: one for each, in their order")
        if self.tokenizer is None:
            raise ValueError("kv_events is not allowed without tokenizer: events name pages by their tokens")
        for place in self.kv_events:
            if not EVENTS.fullmatch(place):
                raise ValueError(f"kv_events {shown(place)} is not allowed: tcp://host:port, or ipc://path")
