"""In which order the requests of several clients are served: start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996), by tokens, as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024)."""

from collections import OrderedDict

CLIENTS = 4096  # whose shares are remembered


class FairQueue:
    """A place in line for each request: behind what its client has asked for since it last was idle, so that
    one who sends a thousand requests does not delay another's first."""

    def __init__(self):
        self._now = 0  # place of the latest request that was served
        self._ends: OrderedDict[str, int] = OrderedDict()

    def place(self, client: str, tokens: int) -> int:
        """Of a request that may cost so many tokens; smaller ones are served first."""
        assert tokens > 0, "a request would move its client forwards"
        start = max(self._now, self._ends.pop(client, 0))
        self._ends[client] = start + tokens
        if len(self._ends) > CLIENTS:
            self._ends.popitem(last=False)
        return start

    def served(self, place: int) -> None:
        """A request's first token has come."""
        self._now = max(self._now, place)
