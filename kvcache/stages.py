"""Stages of a pipeline: consecutive layers on devices of their own (GPipe, Huang et al., arXiv 1811.06965),
derived from the devices of the parameters. Keys stay with the layers that make them.

With attention-FFN disaggregation (AFD), FFN weights are on other devices. Activations then cross to them and
back in every layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax

from ..model.attention import Attention
from ..model.config import ModelConfig
from ..model.draft_pair import EngineParams, target_params
from ..model.sharding import tree_devices
from ..model.transformer import Decoder, Layer
from .pages import KVCache


def pipeline_stages(params: EngineParams) -> list[range]:
    """Return the layer numbers of each stage; one stage if all parameters share their devices.

    Raises ValueError if layers on the same devices are not consecutive. Raises it too if the embedding, norm
    or head is not on the devices of the first or last layer.
    """
    target = target_params(params)
    spans, start = [], 0
    for _, layers in groupby(target.layers, tree_devices):
        count = len(list(layers))
        spans.append(range(start, start + count))
        start += count
    if len(spans) > 1:
        check_pipeline_stages(target, spans)
    return spans


def check_pipeline_stages(params: Decoder, spans: Sequence[range]) -> None:
    """Raise ValueError for parameters whose stages cannot form a pipeline."""
    stage_devices = [tree_devices(params.layers[span.start]) for span in spans]
    if len(set().union(*stage_devices)) < sum(map(len, stage_devices)):
        raise ValueError(
            "the layers of a pipeline's stage must follow one another: two stages share a device"
        )
    if params.head is None:
        raise ValueError(
            "a pipeline's parameters need a head, on the devices of the last layer: a copy of embed where "
            "they are tied"
        )
    if params.inputs is not None or any(has_borrowed_keys(layer) for layer in params.layers):
        raise ValueError(
            "a pipeline's layers have keys of their own, and no input but what the layer before hands them"
        )
    ends = {"embed": (params.embed, 0), "norm": (params.norm, -1), "head": (params.head, -1)}
    for name, (part, stage) in ends.items():
        if tree_devices(part) not in (frozenset(), stage_devices[stage]):
            which = "first" if stage == 0 else "last"
            raise ValueError(f"parameter {name} must lie on the devices of the {which} layer of a pipeline")


def has_separate_ffn(params: EngineParams) -> bool:
    """True if FFN layers are on other devices than the rest (AFD)."""
    return any(
        tree_devices(layer.ffn) - tree_devices(layer.any_mixer_leaf) for layer in target_params(params).layers
    )


def num_device_groups(params: EngineParams) -> int:
    """Return the number of device groups that a step visits: the stages of a pipeline, two with AFD, or
    one."""
    return 2 if has_separate_ffn(params) else len(pipeline_stages(params))


def params_without_ffn(params: Decoder) -> Decoder:
    """Return the parameters with layers that have no FFN."""
    return replace(params, layers=tuple(map(drop_ffn, params.layers)))


def ffn_params_by_layer(params: Decoder) -> tuple[Any, ...]:
    """Return the parameters of the FFN layers."""
    return tuple(layer.ffn for layer in params.layers)


def drop_ffn(layer: Layer) -> Layer:
    """Return a layer without its FFN."""
    return replace(layer, ffn=None)


def has_borrowed_keys(layer: Layer) -> bool:
    """True if a layer reads the keys and values of another layer."""
    return isinstance(layer.attention, Attention) and not layer.attention.has_keys


def stage_params(params: Decoder, span: range) -> Decoder:
    """Return the parameters of a stage. The first stage has the embedding, the last stage the norm and the
    head."""
    is_first, is_last = span.start == 0, span.stop == len(params.layers)
    norm, head, head_bias = (params.norm, params.head, params.head_bias) if is_last else (None, None, None)
    return Decoder(
        embed=params.embed if is_first else None,
        layers=params.layers[span.start : span.stop],
        norm=norm,
        head=head,
        positions=params.positions if is_first else None,
        embed_norm=params.embed_norm if is_first else None,
        head_bias=head_bias,
    )


def stage_config(config: ModelConfig, span: range) -> ModelConfig:
    """Return the model config of a stage."""
    return replace(config, layers=config.layers[span.start : span.stop])


def stage_cache(cache: KVCache, span: range) -> KVCache:
    """Return the pools of a stage."""
    return jax.tree.map(
        lambda pools: pools[span.start : span.stop], cache, is_leaf=lambda x: type(x) is tuple
    )


def join_caches(parts: Iterable[KVCache]) -> KVCache:
    """Join the pools of all stages, in order, to one cache."""
    return jax.tree.map(lambda *pools: sum(pools, ()), *parts, is_leaf=lambda x: type(x) is tuple)


def outer_params(params: Decoder) -> Decoder:
    """Return the parameters before the first layer and after the last."""
    return replace(params, layers=())
