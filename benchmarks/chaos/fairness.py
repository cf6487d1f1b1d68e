"""Fair shares of the router, checked from outside: in start-time fair queueing two clients that wait all the
time are served tokens that differ by at most the largest request of each (Goyal, Vin and Cheng, SIGCOMM
1996)."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations

from benchmarks.chaos.clients import Asked
from benchmarks.chaos.machine import Violation
from duetto.serve.kv.routing.placement import RoutedPrompt


@dataclass
class Span:
    """A span of time in which two clients wait: the least and the greatest lead of the first."""

    lead: int = 0
    least: int = 0
    most: int = 0

    def served(self, tokens: int) -> None:
        self.lead += tokens
        self.least, self.most = min(self.least, self.lead), max(self.most, self.lead)


@dataclass
class FairnessMonitor:
    """Follows which requests wait and which are sent on. Clients whose requests leave
    the queue otherwise are left out from then on."""

    waiting: dict[int, tuple[RoutedPrompt, Asked]] = field(default_factory=dict)
    spans: dict[tuple[str, str], Span] = field(default_factory=dict)
    largest: Counter[str] = field(default_factory=Counter)
    charged: set[str] = field(default_factory=set)  # clients that were charged for nothing
    worst: str = ""
    checks: int = 0

    def queued(self, prompt: RoutedPrompt, ask: Asked) -> None:
        self.waiting[id(prompt)] = prompt, ask
        self.largest[ask.client] = max(self.largest[ask.client], ask.cost)
        self._renew()

    def assigned(self, prompt: RoutedPrompt) -> None:
        if id(prompt) not in self.waiting:
            return  # sent to another replica before
        _, ask = self.waiting.pop(id(prompt))
        for (a, b), span in self.spans.items():
            if ask.client in (a, b):
                span.served(ask.cost if ask.client == a else -ask.cost)
                self._compare(a, b, span)
        self._renew()

    def left(self, ask: Asked) -> None:
        """A request has left the queue without a replica: its client has been charged for nothing."""
        for key, (_, own) in list(self.waiting.items()):
            if own is ask:
                del self.waiting[key]
                self.charged.add(ask.client)
        self._renew()

    def _renew(self) -> None:
        """Begin the spans of pairs of which both wait now, and end those of others."""
        now = {ask.client for _, ask in self.waiting.values()} - self.charged
        pairs = set(combinations(sorted(now), 2))
        self.spans = {pair: self.spans.get(pair, Span()) for pair in sorted(pairs)}

    def _compare(self, a: str, b: str, span: Span) -> None:
        self.checks += 1
        bound = self.largest[a] + self.largest[b]
        if span.most - span.least > bound and not self.worst:
            self.worst = f"{a} and {b} differ by {span.most - span.least} tokens, at most {bound} are fair"

    def check(self) -> None:
        if self.worst:
            raise Violation(self.worst)
