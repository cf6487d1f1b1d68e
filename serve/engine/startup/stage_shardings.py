"""Shardings of parameters over the stages of a pipeline, or over the two halves of all layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from ....kvcache.shardings import last_sharding
from ....kvcache.stages import tree_devices
from ....model.config import ModelConfig
from ....model.transformer import Decoder
from ...runtime.pipeline.split import needs_borrowed_keys, split_layers


def devices_by_stage(
    all_devices: Sequence[Any], num_stages: int, devices_per_stage: int
) -> list[Sequence[Any]]:
    """Return the devices of each stage. Raises ValueError if there are too few."""
    if num_stages * devices_per_stage > len(all_devices):
        hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of a CPU)"
        raise ValueError(
            f"pipeline_parallel_size {num_stages} is not allowed: {num_stages} stages of {devices_per_stage} "
            f"devices are {num_stages * devices_per_stage}, devices here are {len(all_devices)}"
            + (hint if all_devices[0].platform == "cpu" else "")
        )
    return [all_devices[i * devices_per_stage : (i + 1) * devices_per_stage] for i in range(num_stages)]


def join_stage_shardings(config: ModelConfig, stage_shardings: Sequence[Decoder]) -> Decoder:
    """Return one tree of shardings from a tree for each stage. A layer has the shardings of its stage."""
    spans = split_layers(config, len(stage_shardings))
    layers = tuple(stage_shardings[i].layers[layer] for i, span in enumerate(spans) for layer in span)
    last = stage_shardings[-1]
    return replace(
        stage_shardings[0], layers=layers, norm=last.norm, head=last.head, head_bias=last.head_bias
    )


def replace_ffn_shardings(attention_decoder: Decoder, ffn_decoder: Decoder) -> Decoder:
    """Return the shardings of `attention_decoder`, with the feed-forward layers of `ffn_decoder`."""
    layer_pairs = zip(attention_decoder.layers, ffn_decoder.layers, strict=True)
    return replace(
        attention_decoder, layers=tuple(replace(layer, ffn=ffn_layer.ffn) for layer, ffn_layer in layer_pairs)
    )


def check_separate_ffn(config: ModelConfig, ffn_devices: int) -> None:
    """Raise ValueError for a model whose layers cannot be divided into attention and feed-forward halves."""
    obstacles = {
        "inputs of their own": config.layer_input,
        "the keys of others": any(map(needs_borrowed_keys, config.layers)),
        "no feed-forward layer": any(kind.ffn is None for kind in config.layers),
    }
    for what, is_so in obstacles.items():
        if is_so:
            raise ValueError(
                f"experimental_ffn_devices {ffn_devices} is not allowed for a model whose layers have {what}"
            )


def with_last_stage_head(params: Decoder) -> Decoder:
    """Copy a tied embedding to the last stage of a pipeline, as its head; return other parameters
    unchanged."""
    sharding = last_sharding(params)
    if params.head is not None or sharding.device_set == tree_devices(params.embed):
        return params
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, params.embed.sharding.spec)
    if isinstance(params.embed, jax.ShapeDtypeStruct):
        shape = jax.ShapeDtypeStruct(params.embed.shape, params.embed.dtype, sharding=sharding)
        return replace(params, head=shape)
    return replace(params, head=jax.device_put(params.embed, sharding))
