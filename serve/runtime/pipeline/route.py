"""Route of a step over groups of devices. A pipeline visits its stages one after the other. With AFD
(attention-FFN disaggregation) feed-forward layers are on separate devices: every layer is cut into two
halves, and a step alternates between two groups (Step-3, Wang et al., arXiv 2507.19427; MegaScale-Infer, Zhu
et al., arXiv 2504.02263)."""

from dataclasses import dataclass, replace
from typing import Any

from ....kvcache.stages import drop_ffn, has_separate_ffn, outer_params, pipeline_stages, stage_params
from ....model.draft_pair import EngineParams, target_params
from ....model.transformer import Decoder, Layer

# Halves of a layer, in the order of their groups of devices.
ATTENTION_HALF, FFN_HALF = LAYER_HALVES = "attention", "ffn"


@dataclass(frozen=True)
class Stage:
    """Part of a step on one group of devices.

    group: index of the group.
    layers: indices of the layers that are computed; empty for the stage after the last layer.
    half: half of its layer that is computed; None for whole layers.
    is_first: True if the stage embeds the tokens.
    is_last: True if the stage samples.
    """

    group: int
    layers: range
    half: str | None = None
    is_first: bool = False
    is_last: bool = False

    @property
    def name(self) -> str:
        """Name of the half, or the layers' range."""
        return self.half or f"{self.layers.start}-{self.layers.stop - 1}"

    @property
    def pool_layers(self) -> range:
        """Indices of the layers whose keys and states the stage holds."""
        return range(0) if self.half == FFN_HALF else self.layers

    def select_params(self, params: Decoder) -> Any:
        """Return the stage's parameters. An attention half also has the parameters after the feed-forward
        layer of the layer before it."""
        start, stop = self.layers.start, self.layers.stop
        if self.half is None:
            return stage_params(params, self.layers)
        if self.half == FFN_HALF:
            return params.layers[start].ffn
        ends = outer_params(params) if self.is_first or self.is_last else Decoder(None, (), None)
        previous_ffn_ends = map(post_ffn_params, params.layers[max(start - 1, 0) : start])
        return replace(ends, layers=(*previous_ffn_ends, *map(drop_ffn, params.layers[start:stop])))


def make_route(params: EngineParams) -> list[Stage]:
    """Return the stages of a step in order, by the placement of the parameters."""
    count = len(target_params(params).layers)
    if not has_separate_ffn(params):
        spans = pipeline_stages(params)
        return [Stage(i, span, None, span.start == 0, span.stop == count) for i, span in enumerate(spans)]
    halves = [
        Stage(group, range(i, i + 1), half, is_first=group == i == 0)
        for i in range(count)
        for group, half in enumerate(LAYER_HALVES)
    ]
    return [*halves, Stage(0, range(count, count), ATTENTION_HALF, is_last=True)]


def post_ffn_params(layer: Layer) -> Layer:
    """Return the parameters of a layer that apply after its feed-forward layer: a norm and a scale."""
    return Layer(None, None, None, None, ffn_post_norm=layer.ffn_post_norm, scale=layer.scale)
