"""New weights for a running engine: the checks that its programs can take them."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kvcache.page_hash import root_hash
from ....model.transformer import Decoder
from ....model.tree import leaves_by_path
from ....model.weights.device_forms import DeviceForms, convert_to_device_forms, split_qkv
from ....model.weights.lora import drop_lora, lora_stacks, with_lora_stacks


def make_root_hash(config: Any, params: Any, kv_cache_dtype: str) -> bytes:
    """Return the hash that an engine's page hashes begin from: of its model, dtypes and cache dtype."""
    shapes = split_qkv(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    return root_hash(str(config), str(jax.tree.map(lambda x: x.dtype, shapes)), kv_cache_dtype)


def adapt_new_params(decoder: Decoder, new_decoder: Decoder) -> Decoder:
    """Return the parameters `new_decoder` in the forms of the parameters `decoder`, with the adapters of
    these.

    Raises ValueError like `require_matching_params`.
    """
    weights = drop_lora(decoder)
    new_decoder = convert_to_device_forms(new_decoder, DeviceForms.from_params(weights))
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


def describe_array(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
