"""Where parameters go: the devices of a pipeline's stages, or of either half of all layers, and what lies
there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from ....kvcache.stages import devices
from ....model.config import ModelConfig
from ....model.transformer import Decoder
from ...runtime.pipeline.split import borrowed, split


def device_groups(found: Sequence[Any], stages: int, each: int) -> list[Sequence[Any]]:
    """The devices of each stage. Raises ValueError where there are too few."""
    if stages * each > len(found):
        hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of a CPU)"
        raise ValueError(
            f"pipeline_parallel_size {stages} is not allowed: {stages} stages of {each} devices are "
            f"{stages * each}, devices here are {len(found)}" + (hint if found[0].platform == "cpu" else "")
        )
    return [found[i * each : (i + 1) * each] for i in range(stages)]


def staged(config: ModelConfig, places: Sequence[Decoder]) -> Decoder:
    """Join trees of shardings, one for each stage's devices: each layer has its stage's."""
    spans = split(config, len(places))
    layers = tuple(places[i].layers[layer] for i, span in enumerate(spans) for layer in span)
    last = places[-1]
    return replace(places[0], layers=layers, norm=last.norm, head=last.head, head_bias=last.head_bias)


def halved(own: Decoder, theirs: Decoder) -> Decoder:
    """Return the shardings of `own` with the feed-forward layers of `theirs`."""
    each = zip(own.layers, theirs.layers, strict=True)
    return replace(own, layers=tuple(replace(layer, ffn=other.ffn) for layer, other in each))


def check_halves(config: ModelConfig, ffn: int) -> None:
    """Raise ValueError for layers that cannot be cut in two."""
    found = {
        "inputs of their own": config.layer_input,
        "the keys of others": any(map(borrowed, config.layers)),
        "no feed-forward layer": any(kind.ffn is None for kind in config.layers),
    }
    for what, is_so in found.items():
        if is_so:
            raise ValueError(
                f"experimental_ffn_devices {ffn} is not allowed for a model whose layers have {what}"
            )


def with_head(params: Decoder) -> Decoder:
    """Copy an embedding that is the head as well to a pipeline's last stage; other parameters stay as they
    are."""
    where = params.norm.gain.sharding
    if params.head is not None or where.device_set == devices(params.embed):
        return params
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, params.embed.sharding.spec)
    if isinstance(params.embed, jax.ShapeDtypeStruct):
        shape = jax.ShapeDtypeStruct(params.embed.shape, params.embed.dtype, sharding=where)
        return replace(params, head=shape)
    return replace(params, head=jax.device_put(params.embed, where))
