"""The stages of a pipeline: consecutive layers on devices of their own (GPipe, Huang et al., arXiv
1811.06965), read off where the parameters lie. Keys stay with the layers that make them.

Feed-forward layers may lie apart, on devices of their own: then a step goes to and fro in each layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax

from ..model.attention import Attention
from ..model.config import ModelConfig
from ..model.pair import Params, target_of
from ..model.transformer import Decoder, Layer
from .pages import KVCache


def stages(params: Params) -> list[range]:
    """The layers of each stage; one stage where all parameters share their devices.

    Raises ValueError where layers of the same devices do not follow one another, or what stands before the
    first layer, or behind the last, lies elsewhere.
    """
    target = target_of(params)
    found, start = [], 0
    for _, layers in groupby(target.layers, devices):
        count = len(list(layers))
        found.append(range(start, start + count))
        start += count
    if len(found) > 1:
        check(target, found)
    return found


def check(params: Decoder, found: Sequence[range]) -> None:
    places = [devices(params.layers[span.start]) for span in found]
    if len(set().union(*places)) < sum(map(len, places)):
        raise ValueError(
            "the layers of a pipeline's stage must follow one another: two stages share a device"
        )
    if params.head is None:
        raise ValueError(
            "a pipeline's parameters need a head, on the devices of the last layer: a copy of embed where "
            "they are tied"
        )
    if params.inputs is not None or any(borrows(layer) for layer in params.layers):
        raise ValueError(
            "a pipeline's layers have keys of their own, and no input but what the layer before hands them"
        )
    ends = {"embed": (params.embed, 0), "norm": (params.norm, -1), "head": (params.head, -1)}
    for name, (part, stage) in ends.items():
        if devices(part) != places[stage]:
            which = "first" if stage == 0 else "last"
            raise ValueError(f"parameter {name} must lie on the devices of the {which} layer of a pipeline")


def is_apart(params: Params) -> bool:
    """True if feed-forward layers lie on other devices than the rest."""
    return any(devices(layer.ffn) - devices(layer.any_norm) for layer in target_of(params).layers)


def stations(params: Params) -> int:
    """Number of device groups that a step visits: a pipeline's stages, attention's and the feed-forward
    layers', or one."""
    return 2 if is_apart(params) else len(stages(params))


def attending(params: Decoder) -> Decoder:
    """All parameters but the feed-forward layers'."""
    return replace(params, layers=tuple(map(attention_of, params.layers)))


def feeding(params: Decoder) -> tuple[Any, ...]:
    """The feed-forward layers' parameters."""
    return tuple(layer.ffn for layer in params.layers)


def attention_of(layer: Layer) -> Layer:
    return replace(layer, ffn=None)


def borrows(layer: Layer) -> bool:
    return isinstance(layer.attention, Attention) and not layer.attention.has_keys


def devices(tree: Any) -> frozenset[Any]:
    """All devices of a tree's arrays, or of shapes that have a place."""
    return frozenset().union(*(leaf.sharding.device_set for leaf in jax.tree.leaves(tree)))


def params_of(params: Decoder, span: range) -> Decoder:
    """The parameters of a stage; the first has the embedding, the last the norm and the head."""
    is_first, is_last = span.start == 0, span.stop == len(params.layers)
    norm, head, head_bias = (params.norm, params.head, params.head_bias) if is_last else (None, None, None)
    return Decoder(
        embed=params.embed if is_first else None,
        layers=params.layers[span.start : span.stop],
        norm=norm,
        head=head,
        positions=params.positions if is_first else None,
        head_bias=head_bias,
    )


def config_of(config: ModelConfig, span: range) -> ModelConfig:
    """The sizes of a stage."""
    return replace(config, layers=config.layers[span.start : span.stop])


def cache_of(cache: KVCache, span: range) -> KVCache:
    """The pools of a stage."""
    return jax.tree.map(lambda own: own[span.start : span.stop], cache, is_leaf=lambda x: type(x) is tuple)


def joined(parts: Iterable[KVCache]) -> KVCache:
    """The pools of all stages, in order."""
    return jax.tree.map(lambda *own: sum(own, ()), *parts, is_leaf=lambda x: type(x) is tuple)


def around(params: Decoder) -> Decoder:
    """The parameters before the first layer and after the last."""
    return replace(params, layers=())
