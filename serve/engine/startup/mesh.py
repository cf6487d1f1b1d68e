"""Shardings of a model's parameters over devices: by options, or over a mesh that the user gives."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from ....kvcache.stages import has_separate_ffn, pipeline_stages
from ....kvcache.stages import tree_devices as devices_of
from ....model.config import Experts, LayerKind, ModelConfig
from ....model.experts import MoE, inner_dims
from ....model.sharding import (
    DATA_AXIS,
    Axes,
    Layout,
    axis_tuple,
    fit_sharding,
    make_axis_rules,
    make_shardings,
    place_on_devices,
    sharded_axes,
)
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import is_spec
from ....model.weights.device_forms import device_lanes
from ...options.engine import EngineOptions
from .stage_shardings import (
    check_separate_ffn,
    devices_by_stage,
    join_stage_shardings,
    replace_ffn_shardings,
    with_last_stage_head,
)


def make_layout(options: EngineOptions) -> Layout:
    return Layout(
        options.tensor_parallel_size,
        options.enable_expert_parallel,
        options.pipeline_parallel_size,
        options.data_parallel_size,
        options.experimental_ffn_devices or 0,
    )


def param_shardings(
    config: ModelConfig, layout: Layout, mesh: Mesh | None = None, devices: Any = None
) -> Any:
    """Return a sharding for each parameter; None for one device.

    The mesh is `mesh`, or by default the layout's mesh over the first devices. Raises ValueError if sizes or
    devices do not allow the layout, and for a mesh of another size.
    """
    if devices is None:
        devices = jax.devices()
        check_all_devices_used(layout, len(devices))
    if layout.stages > 1:
        return staged_shardings(config, layout, mesh, devices)
    if layout.ffn:
        return separate_ffn_shardings(config, layout, mesh, devices)
    if mesh is None and layout.num_devices == 1:
        return None
    if mesh is None:
        mesh = layout.make_mesh(config.layers, devices)
    else:
        check_mesh(layout, mesh)
    # axes of type Auto, which those of `jax.make_mesh` are not
    mesh = Mesh(mesh.devices, mesh.axis_names)
    lanes = device_lanes(tuple(mesh.devices.flat)).size
    return make_shardings(decoder_spec(config), mesh, layout_axis_rules(layout, config.layers, mesh, lanes))


def layout_axis_rules(
    layout: Layout, layers: Sequence[LayerKind], mesh: Mesh | AbstractMesh, lanes: int
) -> Mapping[str, Axes]:
    """Return the table of axes for a layout's mesh; `lanes` numbers fill a vector register of its devices.

    Each expert is whole on one device if the layout asks for it. That is so too if the parts of split experts
    fill no whole lanes: a TPU would copy them in each step.
    """
    rules = make_axis_rules(mesh, layout.expert_parallel, layout.data > 1)
    if layout.expert_parallel or layout.data > 1:
        return rules
    parts = prod(mesh.shape.get(name, 1) for name in axis_tuple(rules["expert_ffn"]))
    experts = [kind.ffn for kind in layers if isinstance(kind.ffn, Experts)]
    copies = any(c.size // parts % lanes for c in experts)
    return make_axis_rules(mesh, copies and all(c.count % parts == 0 for c in experts))


def check_mesh(layout: Layout, mesh: Mesh) -> None:
    """Raise ValueError if a mesh that the user gives has another size than the layout."""
    data_size = mesh.shape.get(DATA_AXIS, 1) if layout.data > 1 else 1
    if layout.data != data_size:
        raise ValueError(
            f"data_parallel_size {layout.data} is not allowed: the mesh has axes {dict(mesh.shape)}"
        )
    if layout.tensor not in (1, mesh.size // data_size):
        raise ValueError(
            f"tensor_parallel_size {layout.tensor} is not allowed: the mesh has {mesh.size} devices"
        )


def check_all_devices_used(layout: Layout, count: int) -> None:
    """Raise ValueError if several processes have `count` devices, and the layout leaves some out."""
    if jax.process_count() > 1 and layout.num_devices != count:
        raise ValueError(
            f"tensor_parallel_size {layout.tensor} is not allowed: {jax.process_count()} processes have "
            f"{count} devices, and all of them are needed"
        )


def staged_shardings(config: ModelConfig, layout: Layout, mesh: Mesh | None, devices: Any) -> Decoder:
    """Return the shardings of a layout in pipeline stages. Raises ValueError for a mesh that the user
    gives."""
    if mesh is not None:
        raise ValueError(
            f"pipeline_parallel_size {layout.stages} is not allowed with a mesh of your own: "
            "give parameters that lie in stages to LLM.from_params"
        )
    stage_layout = replace(layout, stages=1)
    groups = devices_by_stage(devices, layout.stages, layout.tensor)
    stage_shardings = (
        param_shardings(config, stage_layout, devices=group) or single_device_shardings(config, group[0])
        for group in groups
    )
    return join_stage_shardings(config, list(stage_shardings))


def separate_ffn_shardings(config: ModelConfig, layout: Layout, mesh: Mesh | None, devices: Any) -> Decoder:
    """Return the shardings of a layout whose feed-forward layers have a device of their own.

    Raises ValueError for a mesh that the user gives, and for too few devices.
    """
    check_separate_ffn(config, layout.ffn)
    if mesh is not None:
        raise ValueError(
            f"experimental_ffn_devices {layout.ffn} is not allowed with a mesh of your own: "
            "one device attends, and the next one has the feed-forward layers"
        )
    if layout.num_devices > len(devices):
        raise ValueError(
            f"experimental_ffn_devices {layout.ffn} is not allowed: with the one that attends they are "
            f"{layout.num_devices}, devices here are {len(devices)}"
        )
    return replace_ffn_shardings(
        single_device_shardings(config, devices[0]), single_device_shardings(config, devices[1])
    )


def single_device_shardings(config: ModelConfig, device: Any) -> Decoder:
    """Return the sharding of one device for each parameter."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda _: sharding, decoder_spec(config), is_leaf=is_spec)


def place_params(placement: Any, params: Decoder) -> Decoder:
    """Place parameters, or ShapeDtypeStructs, in the shardings `placement`. All arrays of a record take the
    sharding of their parameter."""

    def place_array(sharding: Any, x: Any) -> Any:
        fitting_sharding = fit_sharding(sharding, x.shape)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fitting_sharding)
        return place_on_devices(x, fitting_sharding)

    return jax.tree.map(
        lambda sharding, weight: jax.tree.map(lambda x: place_array(sharding, x), weight), placement, params
    )


def shard_params(config: ModelConfig, params: Decoder, layout: Layout) -> Decoder:
    """Place parameters by the layout if they are on one device; return them unchanged if they are on several.

    Raises ValueError if they are on several devices and the layout is another one.
    """
    n = len(devices_of(params))
    if has_separate_ffn(params) and not layout.ffn:
        raise ValueError(
            "feed-forward layers that lie on devices of their own are experimental: "
            "set experimental_ffn_devices"
        )
    is_laid_out = (
        has_separate_ffn(params) == bool(layout.ffn) and len(pipeline_stages(params)) == layout.stages
    )
    if layout.num_devices == 1 or (n == layout.num_devices and is_laid_out):
        sharding: Any = params.embed.sharding
        shards = sharding.mesh.shape.get(DATA_AXIS, 1) if isinstance(sharding, NamedSharding) else 1
        if layout.data > 1 and shards != layout.data:
            raise ValueError(
                f"data_parallel_size {layout.data} is not allowed: the parameters lie on a mesh without an "
                f"axis {DATA_AXIS} of that size"
            )
        return params
    if n > 1:
        data_part = f", data_parallel_size {layout.data}" if layout.data > 1 else ""
        raise ValueError(
            f"tensor_parallel_size {layout.tensor}{data_part} and pipeline_parallel_size {layout.stages} "
            f"are not allowed: the parameters lie on {n} devices"
        )
    return with_last_stage_head(place_params(param_shardings(config, layout), params))


def place_on_device_range(
    config: ModelConfig, params: Decoder, device_range: range, by_expert: bool = False
) -> Decoder:
    """Place parameters on the devices of the given numbers, with every layer split among them.

    by_expert: split the list of experts, not each expert. Raises ValueError if there are too few devices.
    """
    all_devices = jax.devices()
    if device_range.stop > len(all_devices):
        raise ValueError(
            f"prefill_devices and decode_devices are {device_range.stop} together, "
            f"there are {len(all_devices)}"
        )
    chosen = all_devices[device_range.start : device_range.stop]
    placement = param_shardings(config, Layout(len(chosen), by_expert), devices=chosen)
    return place_params(placement or single_device_shardings(config, chosen[0]), params)


def check_expert_shardings(params: Decoder) -> None:
    """Raise ValueError if the arrays of a layer's experts are split differently along the inner dimension.

    Groups of numbers that share a scale may not divide as the numbers do. Every step would gather them.
    """
    for i, layer in enumerate(params.layers):
        if isinstance(layer.ffn, MoE):
            f = layer.ffn.experts
            dims = zip(jax.tree.leaves(f), jax.tree.leaves(inner_dims(f, 1)), strict=True)
            named = isinstance(params.embed.sharding, NamedSharding)
            if named and len({sharded_axes(x, axis) for x, axis in dims if axis >= 0}) > 1:
                raise ValueError(
                    f"layer {i}: experts whose numbers share scales in groups cannot be split over "
                    f"{len(params.embed.sharding.device_set)} devices: set enable_expert_parallel"
                )
