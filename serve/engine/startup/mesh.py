"""Over which devices a model is spread, and how: by options, or by a mesh of one's own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from ....kvcache.stages import devices as devices_of
from ....kvcache.stages import is_apart, stages
from ....model.config import Experts, LayerKind, ModelConfig
from ....model.experts import MoE, inner_dims
from ....model.sharding import DATA, Axes, Layout, axes_of, fitted, listed, place_at, rules_for, shardings
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import is_spec
from ....model.weights.prepared import lanes_of
from ...options.engine import EngineOptions
from .stages import check_halves, device_groups, halved, staged, with_head


def layout_of(options: EngineOptions) -> Layout:
    return Layout(
        options.tensor_parallel_size,
        options.enable_expert_parallel,
        options.pipeline_parallel_size,
        options.data_parallel_size,
        options.experimental_ffn_devices or 0,
    )


def places(config: ModelConfig, layout: Layout, mesh: Mesh | None = None, devices: Any = None) -> Any:
    """A sharding for each parameter on a mesh, by default the layout's over the first devices; None for one
    device.

    Raises ValueError where sizes or devices do not allow the layout, and for a mesh of another size.
    """
    if devices is None:
        devices = jax.devices()
        check_processes(layout, len(devices))
    if layout.stages > 1:
        return staged_places(config, layout, mesh, devices)
    if layout.ffn:
        return halved_places(config, layout, mesh, devices)
    if mesh is None and layout.size == 1:
        return None
    if mesh is None:
        mesh = layout.mesh(config.layers, devices)
    else:
        check_mesh(layout, mesh)
    # with axes of automatic type, as `jax.make_mesh` does not make them
    mesh = Mesh(mesh.devices, mesh.axis_names)
    lanes = lanes_of(tuple(mesh.devices.flat)).size
    return shardings(decoder_spec(config), mesh, layout_rules(layout, config.layers, mesh, lanes))


def layout_rules(
    layout: Layout, layers: Sequence[LayerKind], mesh: Mesh | AbstractMesh, lanes: int
) -> Mapping[str, Axes]:
    """Return the table of axes for a layout's mesh; `lanes` numbers fill a vector register of its devices.

    Experts lie whole on one device each by the layout, and where a TPU would copy parts of them in each step:
    their rows fill no whole lanes.
    """
    rules = rules_for(mesh, layout.experts, layout.data > 1)
    if layout.experts or layout.data > 1:
        return rules
    parts = prod(mesh.shape.get(name, 1) for name in listed(rules["expert_ffn"]))
    experts = [kind.ffn for kind in layers if isinstance(kind.ffn, Experts)]
    copies = any(c.size // parts % lanes for c in experts)
    return rules_for(mesh, copies and all(c.count % parts == 0 for c in experts))


def check_mesh(layout: Layout, mesh: Mesh) -> None:
    """Raise ValueError where a mesh of the user's own is of another size than the layout."""
    own = mesh.shape.get(DATA, 1) if layout.data > 1 else 1
    if layout.data != own:
        raise ValueError(
            f"data_parallel_size {layout.data} is not allowed: the mesh has axes {dict(mesh.shape)}"
        )
    if layout.tensor not in (1, mesh.size // own):
        raise ValueError(
            f"tensor_parallel_size {layout.tensor} is not allowed: the mesh has {mesh.size} devices"
        )


def check_processes(layout: Layout, count: int) -> None:
    """Raise ValueError if several processes have `count` devices, and the layout leaves some out."""
    if jax.process_count() > 1 and layout.size != count:
        raise ValueError(
            f"tensor_parallel_size {layout.tensor} is not allowed: {jax.process_count()} processes have "
            f"{count} devices, and all of them are needed"
        )


def staged_places(config: ModelConfig, layout: Layout, mesh: Mesh | None, devices: Any) -> Decoder:
    """The same for a layout in stages."""
    if mesh is not None:
        raise ValueError(
            f"pipeline_parallel_size {layout.stages} is not allowed with a mesh of your own: "
            "give parameters that lie in stages to LLM.from_params"
        )
    own = replace(layout, stages=1)
    groups = device_groups(devices, layout.stages, layout.tensor)
    found = (places(config, own, devices=group) or on_one(config, group[0]) for group in groups)
    return staged(config, list(found))


def halved_places(config: ModelConfig, layout: Layout, mesh: Mesh | None, devices: Any) -> Decoder:
    """The same where feed-forward layers lie apart."""
    check_halves(config, layout.ffn)
    if mesh is not None:
        raise ValueError(
            f"experimental_ffn_devices {layout.ffn} is not allowed with a mesh of your own: "
            "one device attends, and the next one has the feed-forward layers"
        )
    if layout.size > len(devices):
        raise ValueError(
            f"experimental_ffn_devices {layout.ffn} is not allowed: with the one that attends they are "
            f"{layout.size}, devices here are {len(devices)}"
        )
    return halved(on_one(config, devices[0]), on_one(config, devices[1]))


def on_one(config: ModelConfig, device: Any) -> Decoder:
    one = SingleDeviceSharding(device)
    return jax.tree.map(lambda _: one, decoder_spec(config), is_leaf=is_spec)


def put(where: Any, weights: Decoder) -> Decoder:
    """Parameters, or shapes without numbers, in shardings of their specs; the arrays of a record lie as the
    parameter would."""

    def one(own: Any, x: Any) -> Any:
        place = fitted(own, x.shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        return place_at(x, place)

    return jax.tree.map(lambda own, weight: jax.tree.map(lambda x: one(own, x), weight), where, weights)


def spread(config: ModelConfig, params: Decoder, layout: Layout) -> Decoder:
    """Parameters on one device spread by the layout; those on several stay where they are.

    Raises ValueError where the layout is of another number of devices.
    """
    n = len(devices_of(params))
    if is_apart(params) and not layout.ffn:
        raise ValueError(
            "feed-forward layers that lie on devices of their own are experimental: "
            "set experimental_ffn_devices"
        )
    is_laid_out = is_apart(params) == bool(layout.ffn) and len(stages(params)) == layout.stages
    if layout.size == 1 or (n == layout.size and is_laid_out):
        own: Any = params.embed.sharding
        shards = own.mesh.shape.get(DATA, 1) if isinstance(own, NamedSharding) else 1
        if layout.data > 1 and shards != layout.data:
            raise ValueError(
                f"data_parallel_size {layout.data} is not allowed: the parameters lie on a mesh without an "
                f"axis {DATA} of that size"
            )
        return params
    if n > 1:
        dealt = f", data_parallel_size {layout.data}" if layout.data > 1 else ""
        raise ValueError(
            f"tensor_parallel_size {layout.tensor}{dealt} and pipeline_parallel_size {layout.stages} are not "
            f"allowed: the parameters lie on {n} devices"
        )
    return with_head(put(places(config, layout), params))


def apart(config: ModelConfig, params: Decoder, numbers: range, experts: bool = False) -> Decoder:
    """Parameters on some of the devices, every layer split among them. Raises ValueError where there are too
    few."""
    found = jax.devices()
    if numbers.stop > len(found):
        raise ValueError(
            f"prefill_devices and decode_devices are {numbers.stop} together, there are {len(found)}"
        )
    chosen = found[numbers.start : numbers.stop]
    where = places(config, Layout(len(chosen), experts), devices=chosen)
    return put(where or on_one(config, chosen[0]), params)


def check_experts(params: Decoder) -> None:
    """Raise ValueError where arrays of a layer's experts are not split alike along their inner dimension, as
    where groups of numbers that share a scale do not divide: every step would gather them."""
    for i, layer in enumerate(params.layers):
        if isinstance(layer.ffn, MoE):
            f = layer.ffn.experts
            dims = zip(jax.tree.leaves(f), jax.tree.leaves(inner_dims(f, 1)), strict=True)
            named = isinstance(params.embed.sharding, NamedSharding)
            if named and len({axes_of(x, axis) for x, axis in dims if axis >= 0}) > 1:
                raise ValueError(
                    f"layer {i}: experts whose numbers share scales in groups cannot be split over "
                    f"{len(params.embed.sharding.device_set)} devices: set enable_expert_parallel"
                )
