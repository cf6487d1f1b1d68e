"""Options of the router: its replicas, and how it handles the loss of one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...option_fields import knob
from ...refusals import check_positive, ensure, quote

REPLICA_PATTERN = re.compile(r"https?://[^/?#@=\s]+/?")
ADDRESS_PATTERN = re.compile(r"\S+:\d{1,5}")
EVENTS_PATTERN = re.compile(r"(tcp|ipc)://\S+")


@dataclass(frozen=True)
class RouterOptions:
    """Replicas, and their limits. Raises ValueError for a value that is not allowed."""

    replica: Sequence[str] = knob((), "address of a server, as http://host:8000")
    prefill: Sequence[str] = knob(
        (),
        "address of a server that prefills for the replicas, and its kv_address, as "
        "http://host:8001=host:14579",
    )
    tokenizer: str | None = knob(
        None,
        "folder of the replicas' tokenizer, to compare prompts by tokens as they do; default: by characters",
    )
    kv_events: Sequence[str] | None = knob(
        None,
        "endpoint of a replica's KV cache events, as tcp://host:5557: one for each replica, then for each "
        "prefill; needs tokenizer and page_size; default: a replica is assumed to cache what it was sent",
    )
    page_size: int = knob(64, "tokens of a page of the KV cache, as in the replicas")
    cache_tokens: int = knob(1 << 18, "tokens that a replica's cache is assumed to hold, without kv_events")
    max_in_flight: int = knob(64, "maximum requests in a replica at once; others wait in the router")
    max_attempts: int = knob(3, "maximum replicas that a request is sent to", formerly="attempts")
    resume: bool = knob(
        True, "failover: resume streams of a lost replica on another; for duetto's servers only"
    )
    health_period: float = knob(1.0, "seconds between two health checks of a replica")
    health_timeout: float = knob(
        5.0,
        "seconds for the answer to a health check; two without an answer, or one after a broken connection, "
        "lose the replica",
    )
    replica_timeout: float = knob(
        30.0, "seconds that requests wait while no replica is available; then 503", formerly="max_absence"
    )

    def __post_init__(self):
        ensure(bool(self.replica), "replica is missing: the address of a server, as http://host:8000")
        for url in self.replica:
            refusal = f"replica {quote(url)} is not allowed: http[s]://host[:port]"
            ensure(REPLICA_PATTERN.fullmatch(url) is not None, refusal)
        for pair in self.prefill:
            url, _, address = pair.partition("=")
            is_pair = REPLICA_PATTERN.fullmatch(url) and ADDRESS_PATTERN.fullmatch(address)
            refusal = f"prefill {quote(pair)} is not allowed: http[s]://host[:port]=host:port"
            ensure(is_pair is not None, refusal)
        are_different = len(set(self.servers)) == len(self.servers)
        ensure(are_different, f"replica {quote(self.servers)} is not allowed: each has another address")
        self._check_events()
        sizes = "page_size", "cache_tokens", "max_in_flight", "max_attempts"
        check_positive(self, (*sizes, "health_period", "health_timeout", "replica_timeout"))

    @property
    def servers(self) -> list[str]:
        """Addresses of all servers: first the replicas, then the servers that prefill."""
        return [*self.replica, *(pair.partition("=")[0] for pair in self.prefill)]

    def _check_events(self) -> None:
        if self.kv_events is None:
            return
        count, servers = len(self.kv_events), len(self.servers)
        refusal = f"kv_events is not allowed {count} for {servers} replicas: one for each, in their order"
        ensure(count == servers, refusal)
        refusal = "kv_events is not allowed without tokenizer: events name pages by their tokens"
        ensure(self.tokenizer is not None, refusal)
        for endpoint in self.kv_events:
            refusal = f"kv_events {quote(endpoint)} is not allowed: tcp://host:port, or ipc://path"
            ensure(EVENTS_PATTERN.fullmatch(endpoint) is not None, refusal)
