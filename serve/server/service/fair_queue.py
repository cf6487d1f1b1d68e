"""The order in which requests of several clients are served: start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996), by tokens, as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024)."""

from collections import OrderedDict

MAX_CLIENTS = 4096  # number of the latest clients that are remembered


class FairQueue:
    """Assigns each request a position: after the tokens that its client has requested since it last was idle.
    So a client that sends a thousand requests does not delay another client's first request."""

    def __init__(self):
        self._now = 0  # position of the latest request that was served
        self._ends: OrderedDict[str, int] = OrderedDict()

    def assign_position(self, client: str, tokens: int) -> int:
        """Return the position of a request that may cost up to `tokens`. Smaller positions are served
        first."""
        assert tokens > 0, "a request would move its client forwards"
        start = max(self._now, self._ends.pop(client, 0))
        self._ends[client] = start + tokens
        if len(self._ends) > MAX_CLIENTS:
            self._ends.popitem(last=False)
        return start

    def on_served(self, position: int) -> None:
        """Advance the clock: the first token of a request at this position has arrived."""
        self._now = max(self._now, position)
