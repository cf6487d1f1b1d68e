"""Writes adapters into their places on the device, beside the weights, without a compilation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....kvcache.stages import is_apart
from ....model.config import Experts, ModelConfig
from ....model.layers import Weight
from ....model.pair import Params, target_of, with_target
from ....model.sharding import listed, rules_for, sharding
from ....model.transformer import Decoder
from ....model.tree import Spec
from ....model.weights.adapted import AdapterSizes, adaptable, adapted, places_in, stacks_of
from ...options.engine import EngineOptions
from .places import Places


def with_room(params: Decoder, config: ModelConfig, sizes: AdapterSizes) -> Decoder:
    """Return parameters, or ShapeDtypeStructs, with places for adapters beside them.

    Each lies where its weight does. All places hold the same random numbers, so that the comparison of
    shapes before serving covers adapters too.
    """
    rng, dtype = np.random.default_rng(0), params.embed.dtype
    found = adaptable(config, isinstance(params.embed.sharding, NamedSharding), sizes.experts)
    at = shardings(params)

    def where(spec: Spec, own: Any) -> Any:
        if not isinstance(own, NamedSharding):
            return own
        rules = rules_for(own.mesh)
        split = {name for axes in rules.values() for name in listed(axes)} <= set(own.mesh.axis_names)
        return sharding(spec, own.mesh, rules) if split else NamedSharding(own.mesh, PartitionSpec())

    def drawn(spec: Spec, axis: int, own: Any) -> Any:
        if isinstance(params.embed, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=where(spec, own))
        one = spec.scale * rng.standard_normal([*spec.shape[:axis], 1, *spec.shape[axis + 1 :]])
        alike = np.broadcast_to(one.astype(np.float32), spec.shape).astype(dtype)
        return jax.device_put(alike, where(spec, own))

    stacks = {}
    for path, weight in found.items():
        a, b = sizes.specs(weight)
        stacks[path] = drawn(a, len(a.shape) - 2, at[path]), drawn(b, 0, at[path])
    return adapted(params, stacks)


def shardings(params: Decoder) -> dict[str, Any]:
    """Where each weight lies, an array or a record, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Weight))
    return {
        jax.tree_util.keystr(key, simple=True, separator="."): jax.tree.leaves(w)[0].sharding
        for key, w in leaves
    }


def roomy(params: Decoder, config: ModelConfig, options: EngineOptions) -> Decoder:
    """The same as options say, or the parameters alone. Raises ValueError for halves of layers, and for
    routed experts that are not there, or that devices share."""
    if not options.enable_lora:
        return params
    if is_apart(params):
        raise ValueError("enable_lora is not allowed: feed-forward layers lie on devices of their own")
    if options.lora_experts and not any(isinstance(kind.ffn, Experts) for kind in config.layers):
        raise ValueError("lora_experts is not allowed: the model has no experts")
    if options.lora_experts and isinstance(params.embed.sharding, NamedSharding):
        raise ValueError("lora_experts is not allowed on a mesh: only on one device")
    sizes = AdapterSizes(options.max_loras, options.max_lora_rank, options.lora_experts)
    return with_room(params, config, sizes)


class Writer:
    """Writes adapters into the places of parameters like these, by programs compiled when it is made.

    Arrays are changed in place, but for those of a pipeline, whose threads may yet have to dispatch steps
    with them.
    """

    def __init__(self, params: Decoder):
        self.places = Places(places_in(params))
        self._programs: dict[Any, Any] = {}
        own = [one for pair in stacks_of(params).values() for one in with_axes(pair)]
        groups = {frozenset(stack.sharding.device_set) for stack, _ in own if stack.sharding is not None}
        donate = (0,) if len(groups) <= 1 else ()
        for stack, axis in own:
            if kind(stack, axis) not in self._programs:
                self._programs[kind(stack, axis)] = compiled(stack, axis, donate)

    def write(self, params: Params) -> Params:
        """Write the adapters that are due; returns the parameters, whose arrays of adapters may be
        consumed."""
        due = self.places.due()
        if not due:
            return params
        stacks = stacks_of(target_of(params))
        for place, adapter in due.items():
            assert adapter.terms.keys() <= stacks.keys(), f"{adapter.name} has terms beside other weights"
            for path, pair in stacks.items():
                terms = adapter.terms.get(path, (None, None))
                (a, own), (b, first) = with_axes(pair)
                stacks[path] = self._put(a, own, terms[0], place), self._put(b, first, terms[1], place)
        return with_target(params, adapted(target_of(params), stacks))

    def _put(self, stack: jax.Array, axis: int, term: np.ndarray | None, place: int) -> jax.Array:
        """A stack with a term in a place, which fills it up with zeros."""
        new = np.zeros((*stack.shape[:axis], *stack.shape[axis + 1 :]), stack.dtype)
        if term is not None:
            new[tuple(map(slice, term.shape))] = term
        return self._programs[kind(stack, axis)](stack, new, np.int32(place))


def with_axes(pair: tuple[Any, Any]) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """`a` and `b` of a weight, each with the axis of its places."""
    a, b = pair
    return (a, a.ndim - 2), (b, 0)


def kind(stack: Any, axis: int) -> Any:
    return axis, stack.shape, str(stack.dtype), stack.sharding


def compiled(stack: Any, axis: int, donate: tuple[int, ...]) -> Any:
    """The program that writes into one place of a stack, which stays where it is."""
    new = jax.ShapeDtypeStruct((*stack.shape[:axis], *stack.shape[axis + 1 :]), stack.dtype)
    place = jax.ShapeDtypeStruct((), jnp.int32)
    put_at = partial(jax.lax.dynamic_update_index_in_dim, axis=axis)
    put = jax.jit(put_at, donate_argnums=donate, out_shardings=stack.sharding)
    return put.lower(stack, new, place).compile()
