"""Reasons why the request at the head of the queue is not admitted."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from .request import Request

LOG = logging.getLogger("duetto")


class AdmissionReason(Enum):
    """Reason why a request waits. The log has its value, a sentence; reports have its name in lower case."""

    NO_SLOT = "every slot is taken"
    NO_PAGES = "too few pages of the cache are free for its tokens"
    SHARD_FULL = "the shards with a free slot lack pages, and the other shards lack a slot"
    ADAPTER = "running requests use every place for a LoRA adapter"
    PREFIX_PENDING = "a running request is computing the next page of its prompt"
    KV_TRANSFER = "pages of its prompt are on their way from a tier or a prefill engine"
    PREFILL_BATCHING = "its prefill is held back to be shared with others"


@dataclass
class WaitingReasons:
    """Steps that left the request at the head of the queue waiting, by reason.

    counts: steps by reason.
    last_head: id of the request at the head, and its reason.
    """

    counts: Counter[AdmissionReason] = field(default_factory=Counter)
    last_head: tuple[str, AdmissionReason] | None = None

    def record(self, request: Request, reason: AdmissionReason) -> None:
        """Count a step in which the head waited, and log a change of its reason at level debug."""
        self.counts[reason] += 1
        if (current := (request.id, reason)) != self.last_head:
            self.last_head = current
            LOG.debug("duetto: request %s waits: %s", request.id, reason.value)

    def report(self) -> dict[str, int]:
        """Return the steps for each reason, 0 included."""
        return {reason.name.lower(): self.counts[reason] for reason in AdmissionReason}
