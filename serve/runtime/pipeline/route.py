"""The route of a step over groups of devices. A pipeline visits its stages one after the other. Where the
feed-forward layers have devices of their own, every layer is cut in two, and a step goes to and fro (Step-3,
Wang et al., arXiv 2507.19427; MegaScale-Infer, Zhu et al., arXiv 2504.02263)."""

from dataclasses import dataclass, replace
from typing import Any

from ....kvcache.stages import around, attention_of, is_apart, params_of, stages
from ....model.pair import Params, target_of
from ....model.transformer import Decoder, Layer

ATTENTION, FFN = HALVES = "attention", "ffn"  # those of a layer, by their groups of devices


@dataclass(frozen=True)
class Stage:
    """A part of a step on one group of devices.

    group: index of the group.
    layers: layers that are computed; none behind the last layer.
    half: the half of its layer that is computed, None if whole layers are.
    first: embeds the tokens.
    last: samples.
    """

    group: int
    layers: range
    half: str | None = None
    first: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        return self.half or f"{self.layers.start}-{self.layers.stop - 1}"

    @property
    def pools(self) -> range:
        """Layers whose keys and states it holds."""
        return range(0) if self.half == FFN else self.layers

    def params(self, params: Decoder) -> Any:
        """Its parameters. An attention half also has what follows the feed-forward layer before it."""
        start, stop = self.layers.start, self.layers.stop
        if self.half is None:
            return params_of(params, self.layers)
        if self.half == FFN:
            return params.layers[start].ffn
        ends = around(params) if self.first or self.last else Decoder(None, (), None)
        before = map(behind, params.layers[max(start - 1, 0) : start])
        return replace(ends, layers=(*before, *map(attention_of, params.layers[start:stop])))


def route(params: Params) -> list[Stage]:
    """The stages of a step in order, read off where the parameters lie."""
    count = len(target_of(params).layers)
    if not is_apart(params):
        spans = stages(params)
        return [Stage(i, own, None, own.start == 0, own.stop == count) for i, own in enumerate(spans)]
    halves = [
        Stage(group, range(i, i + 1), half, first=group == i == 0)
        for i in range(count)
        for group, half in enumerate(HALVES)
    ]
    return [*halves, Stage(0, range(count, count), ATTENTION, last=True)]


def behind(layer: Layer) -> Layer:
    """The parameters of a layer that follow its feed-forward layer."""
    return Layer(None, None, None, None, ffn_post_norm=layer.ffn_post_norm, scale=layer.scale)
