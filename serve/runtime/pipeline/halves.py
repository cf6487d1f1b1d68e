"""What a step computes where attention and feed-forward layers lie apart (Step-3, Wang et al., arXiv
2507.19427; MegaScale-Infer, Zhu et al., arXiv 2504.02263): every layer is cut in two.

The part that attends has all that a request leaves behind: keys, states, slots. The other has the
feed-forward layers' weights alone, and remembers nothing. Together they are `programs.step`.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float

from ....kvcache.paged import Paged
from ....kvcache.pages import Batch, KVCache, positions
from ....kvcache.stages import config_of
from ....model.transformer import Layer, after_ffn, attention_half, ffn_half, turns
from ..steps.step import Output, Slots, StageZeroSlots
from .steps import StageActivations, StageStep, device_batch


@dataclass(frozen=True)
class Halves:
    """The halves of the layers that a phase runs through: `whole` is its part for all of them."""

    whole: StageStep

    def attend(
        self,
        i: int,
        own: Layer,
        before: Layer | None,
        cache: KVCache,
        handed: StageActivations,
        made: Float[Array, "B T D"] | None,
        batch: Batch,
    ) -> tuple[KVCache, StageActivations, Float[Array, "B T D"]]:
        """Layer i up to its feed-forward layer, for which the last is: its part of the cache, and what the
        feed-forward layer of the one before has made."""
        config = config_of(self.whole.config, range(i, i + 1))
        fed = self.whole.fed(device_batch(batch, handed))
        x = self._after(before, handed.hidden, made)
        (turn,) = turns(config, positions(fed), handed.lengths)
        attend = Paged(fed, self.whole.config.windows)
        x, inner, cache = attention_half(own, config.layers[0], config, x, turn, attend, cache, 0)
        return cache, replace(handed, hidden=x), inner

    def feed(self, i: int, weights: Any, inner: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The feed-forward layer of layer i."""
        return ffn_half(weights, self.whole.config.layers[i], inner)

    def leave(
        self,
        params: Any,
        before: Layer,
        slots: Slots,
        handed: StageActivations,
        made: Float[Array, "B T D"],
        batch: Batch,
    ) -> tuple[Slots, Output, StageZeroSlots]:
        """What comes of the last layer; of the parameters what stands behind it."""
        x = self._after(before, handed.hidden, made)
        return self.whole.outcome(params, slots, replace(handed, hidden=x), batch)

    def _after(self, before: Layer | None, x: Any, made: Any) -> Any:
        return x if before is None else after_ffn(before, self.whole.config, x, made)


def behind(layer: Layer) -> Layer:
    """What a layer has behind its feed-forward layer."""
    return Layer(None, None, None, None, ffn_post_norm=layer.ffn_post_norm, scale=layer.scale)
