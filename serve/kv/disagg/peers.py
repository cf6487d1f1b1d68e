"""Several engines that compute prompts, as one that fetches their pages sees them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..offload.peer import RemoteKV, RemotePrefill
from ..offload.tier import Content, Key, TierChain
from .peer import RemoteKVTier


class RemoteKVPool(RemoteKV):
    """The tiers of several engines, each under its address, as one.

    A prompt is asked of the engine that its request names. Where that is not there, or none of these, it is
    the one that is asked for the least: so a request can choose among these addresses, and reach no other.
    """

    def __init__(self, tiers: Mapping[str, RemoteKVTier]):
        self.tiers = dict(tiers)
        self._chain = TierChain(list(self.tiers.values()))

    # ------------------------------------------------------------ prompts

    def ask(self, prompt: Sequence[int], pages: int, at: str | None = None) -> RemotePrefill | None:
        for place in self._places(at):
            if (ask := self.tiers[place].ask(prompt, pages)) is not None:
                ask.at = place
                return ask
        return None

    def _places(self, at: str | None) -> Iterator[str]:
        if at in self.tiers:
            yield at
        yield from sorted(self.tiers.keys() - {at}, key=lambda place: self.tiers[place].nbytes)

    def awaits(self, ask: RemotePrefill) -> bool:
        return self.tiers[ask.at].awaits(ask)

    def release(self, ask: RemotePrefill) -> None:
        self.tiers[ask.at].release(ask)

    # ------------------------------------------------------------ pages

    def has(self, key: Key) -> bool:
        return self._chain.has(key)

    def fetch(self, key: Key) -> Content | None:
        return self._chain.fetch(key)

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        for tier in self.tiers.values():
            tier.renew(realm, page_bytes)

    def report(self) -> dict[str, Any]:
        """The sums over all, and each `at` its address."""
        at = {place: tier.report() for place, tier in self.tiers.items()}
        names = next(iter(at.values()))
        return {name: sum(one[name] for one in at.values()) for name in names} | {"at": at}
