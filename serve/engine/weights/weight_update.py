"""New weights for a running engine: their conversion, and the checks that its programs can take them."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kvcache.page_hash import root_hash
from ....model.sharding import fit_sharding
from ....model.transformer import Decoder
from ....model.tree import leaves_by_path, map_by_path, paths_and_leaves
from ....model.weights.device_forms import DeviceForms, convert_to_device_forms, restore_params, split_qkv
from ....model.weights.lora import drop_lora, lora_stacks, with_lora_stacks
from ....model.weights.quant import Quantised


def make_root_hash(config: Any, params: Any, kv_cache_dtype: str) -> bytes:
    """Return the hash that an engine's page hashes begin from: of its model, dtypes and cache dtype."""
    shapes = split_qkv(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    return root_hash(str(config), str(jax.tree.map(lambda x: x.dtype, shapes)), kv_cache_dtype)


def match_served_params(decoder: Decoder, new_decoder: Decoder, copy: bool) -> tuple[Decoder, bool]:
    """Return new parameters in the dtypes and shardings of the served ones, and whether they are copies.

    Numbers of another floating-point dtype are rounded to the nearest, and arrays of another sharding or
    layout are laid out again, both on their devices. If a parameter needs that, or with `copy`, no array is
    the caller's. Otherwise all are. Raises ValueError if a shape differs, and in a group of processes.
    """
    require_one_process(decoder, "update_params")
    targets = make_update_targets(decoder)
    new_leaves = leaves_by_path(new_decoder)
    forms = {path: choose_array_form(path, x, targets.get(path)) for path, x in new_leaves.items()}
    if not copy and all(has_array_form(x, forms[path]) for path, x in new_leaves.items()):
        return new_decoder, False
    return map_by_path(new_decoder, (), lambda path, x: copy_array(x, forms[path])), True


def make_update_targets(decoder: Decoder) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and sharding of each parameter that an update gives, by path. A weight that the
    engine quantises is given in the dtype of computation."""
    records = paths_and_leaves(restore_params(shapes_with_shardings(decoder)), Quantised)
    return {
        path: x
        if isinstance(x, jax.ShapeDtypeStruct)
        else jax.ShapeDtypeStruct(
            x.shape, decoder.embed.dtype, sharding=fit_sharding(x.values.sharding, x.shape)
        )
        for path, x in records
    }


def choose_array_form(path: str, x: jax.Array, target: jax.ShapeDtypeStruct | None) -> jax.ShapeDtypeStruct:
    """Return the dtype and sharding in which a given parameter can be served. They are the target's, but for
    a dtype that is no float, and for other devices. Raises ValueError if the shapes differ."""
    if target is None:
        return shape_with_sharding(x)
    if x.shape != target.shape:
        raise ValueError(f"update_params: {path} is {describe_array(x)}, expected {describe_array(target)}")
    is_rounded = all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, target))
    is_here = x.sharding.device_set == target.sharding.device_set
    dtype, sharding = (target if is_rounded else x).dtype, (target if is_here else x).sharding
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)


def has_array_form(x: jax.Array, form: jax.ShapeDtypeStruct) -> bool:
    """Return True if an array has the form's dtype and sharding, and lies row by row."""
    layout = x.format.layout  # pyright: ignore[reportAttributeAccessIssue]
    is_row_major = layout is None or layout.major_to_minor == tuple(range(x.ndim))
    return x.dtype == form.dtype and x.sharding.is_equivalent_to(form.sharding, x.ndim) and is_row_major


def copy_array(x: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a copy of an array in the form's dtype and sharding, made on its devices."""
    # the devices of a jitted function's arguments and results have one order; `device_put` reorders shards
    has_one_order = device_order(x.sharding) == device_order(form.sharding)
    sharding = form.sharding if has_one_order else x.sharding
    copy = jax.jit(jnp.array, static_argnames="dtype", out_shardings=sharding)(x, dtype=form.dtype)
    return copy if has_one_order else jax.device_put(copy, form.sharding)


def device_order(sharding: Any) -> list[Any]:
    """Return the devices of a sharding in their order."""
    mesh = getattr(sharding, "mesh", None)
    return list(sharding.device_set if mesh is None else mesh.devices.flat)


def shape_with_sharding(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def shapes_with_shardings(tree: Any) -> Any:
    """Return the shapes, dtypes and shardings of a tree's arrays."""
    return jax.tree.map(shape_with_sharding, tree)


def adapt_new_params(decoder: Decoder, new_decoder: Decoder, donate: bool = False) -> Decoder:
    """Return the parameters `new_decoder` in the forms of the parameters `decoder`, with the adapters of
    these. With `donate` a weight is deleted once another form of it is ready.

    Raises ValueError like `require_codes` and `require_matching_params`.
    """
    weights = drop_lora(decoder)
    require_codes(weights, new_decoder)
    new_decoder = convert_to_device_forms(new_decoder, DeviceForms.from_params(weights), donate)
    require_matching_params(weights, new_decoder)
    stacks = lora_stacks(decoder)
    return (
        with_lora_stacks(
            new_decoder,
            {path: (zeros_if_released(a), zeros_if_released(b)) for path, (a, b) in stacks.items()},
        )
        if stacks
        else new_decoder
    )


def require_codes(old_decoder: Decoder, new_decoder: Decoder) -> None:
    """Raise ValueError for an array in place of a weight that is served in codes."""
    before, after = (
        dict(paths_and_leaves(restore_params(shapes_with_shardings(decoder)), Quantised))
        for decoder in (old_decoder, new_decoder)
    )
    schemes = {path: weight.scheme for path, weight in before.items() if isinstance(weight, Quantised)}
    arrays = (path for path in schemes if isinstance(after.get(path), jax.ShapeDtypeStruct))
    if (path := next(arrays, None)) is not None:
        raise ValueError(
            f"update_params: {path} is {describe_array(after[path])}, expected codes in {schemes[path]}: "
            "arrays are quantised only if the option quantization names a scheme"
        )


def zeros_if_released(x: Any) -> jax.Array:
    """Return an array as it is; zeros for a ShapeDtypeStruct, whose array was released for sleep."""
    return jnp.zeros(x.shape, x.dtype, device=x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x


def require_matching_params(old_decoder: Decoder, new_decoder: Decoder) -> None:
    """Raise ValueError if a shape, dtype or sharding differs, and in a group of processes."""
    require_one_process(old_decoder, "update_params")
    before, after = leaves_by_path(old_decoder), leaves_by_path(new_decoder)
    for path in before | after:
        a, b = before.get(path), after.get(path)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"update_params: {path} is {describe_array(b)}, expected {describe_array(a)}")
        if not b.sharding.is_equivalent_to(a.sharding, a.ndim):
            raise ValueError(f"update_params: {path} lies in {b.sharding}, expected {a.sharding}")


def require_one_process(params: Any, method: str) -> None:
    """Raise ValueError if other processes hold a part of the parameters. `method` names the refused
    method."""
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(params)):
        raise ValueError(f"{method} is not allowed with several processes (nnodes)")


def describe_array(x: jax.Array | jax.ShapeDtypeStruct | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
