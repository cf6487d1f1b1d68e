"""The seam `Drafter`: draft tokens from the host. A drafter sees tokens and nothing else, so it cannot change
a result."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ....kvcache.pages import ON_DEVICE
from ...options.speculation import SpeculativeConfig
from .ngram import NgramDrafter
from .suffix import SuffixDrafter


@runtime_checkable
class Drafter(Protocol):
    """Proposes what follows the tokens of requests. Preemption is no event here: a request keeps its
    tokens."""

    def begin(self, request: Hashable, prompt: Sequence[int], salt: bytes = b"") -> None:
        """Register a request with its prompt and its cache salt: outputs of other salts may not serve it."""
        ...

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Append tokens that a request generated."""
        ...

    def propose(self, request: Hashable, k: int) -> list[int]:
        """Return at most k draft tokens; none if nothing is known."""
        ...

    def end(self, request: Hashable) -> None:
        """Forget a request that finished or was aborted; its output may serve others."""
        ...


@dataclass(frozen=True)
class ConstantDrafter:
    """Proposes one token again and again, independently of the text; None proposes nothing."""

    token: int | None = None

    def begin(self, request: Hashable, prompt: Sequence[int], salt: bytes = b"") -> None: ...

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None: ...

    def propose(self, request: Hashable, k: int) -> list[int]:
        return [] if self.token is None else [self.token] * k

    def end(self, request: Hashable) -> None: ...


NO_DRAFTER, DEVICE_DRAFTER = ConstantDrafter(), ConstantDrafter(ON_DEVICE)  # the latter: the device proposes


def make_host_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter of a method; for methods on the device the placeholder DEVICE_DRAFTER."""
    if config.method == "ngram":
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixDrafter(
            depth=config.suffix_decoding_max_tree_depth,
            capacity=config.suffix_decoding_max_cached_tokens,
            spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    return NO_DRAFTER if config.method == "none" else DEVICE_DRAFTER
