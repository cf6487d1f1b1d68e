"""Mixtures of experts: a router in float32, and only the chosen experts' products (Shazeer et al., arXiv
1701.06538).

Tokens are sorted by expert. A TPU multiplies the sorted rows with `jax.lax.ragged_dot`, and an NVIDIA GPU
with a kernel that `choose_expert_kernel` chooses. A CPU uses duetto's own kernels if its weights are
`Packed`. Elsewhere XLA (of jax 0.10) computes all experts for `ragged_dot`. There we go through tiles of rows
of one expert (as MegaBlocks does, Gale et al., arXiv 2211.15841). A token's bits depend neither on the other
tokens nor on their number: all tiles of a step have one size, and a product computes each row by itself.
"""

from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..config import Experts
from ..ffn import FFN, activate, feed_forward, ffn_spec
from ..layers import (
    Norm,
    NormWeight,
    PerRowWeight,
    Weight,
    add_bias,
    apply_softcap,
    einsum,
    index_or_drop,
    norm_spec,
    prevent_fma,
    ragged_dot,
)
from ..sharding import is_multi_device
from ..tree import Spec, is_spec, map_instances, pytree, static
from ..weights.cpu.panels import Packed
from ..weights.grouped_matmul import choose_expert_kernel
from ..weights.input_quantised import InputQuantised


@pytree
class MoE:
    """A router, E experts side by side, and the shared expert. A field is None if the family does not have
    it."""

    router: Any  # [D,E]
    experts: FFN  # each leaf with E before its axes
    router_bias: Any = None  # [E]
    correction: Any = None  # [E]
    shared: FFN | None = None
    scales: Any = None  # [E]
    norms: Any = None  # Norms, if the layer's input is not normed
    output_norm: Norm | NormWeight | None = None
    expert_axes: Any = static(None)  # an ExpertAxes, if devices share the layer


@pytree
class Norms:
    """Norms of the inputs of the router, the experts and the shared expert, and of the outputs of the latter
    two."""

    router: Norm | NormWeight
    experts: Norm | NormWeight
    shared: Norm | NormWeight
    experts_post: Norm | NormWeight
    shared_post: Norm | NormWeight


def experts_spec(c: Experts, D: int, depth: int) -> MoE:
    """Return the specs of one layer of experts in a model of `depth` layers."""
    E = c.count

    def stack_spec(spec: Spec) -> Spec:
        axes = tuple("expert_ffn" if name == "ffn" else name for name in spec.axes)
        return replace(spec, shape=(E, *spec.shape), axes=("experts", *axes))

    return MoE(
        router=Spec((D, E), ("model", "scores")),
        experts=jax.tree.map(stack_spec, ffn_spec(c.expert_ffn, D, depth), is_leaf=is_spec),
        router_bias=Spec((E,), ("scores",), scale=0.0) if c.router_bias else None,
        correction=Spec((E,), ("scores",), scale=0.0, dtype=jnp.float32) if c.correction else None,
        shared=ffn_spec(c.shared_ffn, D, depth) if c.shared else None,
        scales=Spec((E,), ("scores",), mean=1.0, scale=0.0) if c.scales else None,
        norms=Norms(*[norm_spec(c.norms, D)] * 5) if c.norms else None,
        output_norm=norm_spec(c.output_norm, D) if c.output_norm else None,
    )


class LocalExperts(NamedTuple):
    """The experts that a device holds.

    expert_ffn: the routed experts, each leaf with E before its axes.
    shared_ffn: the shared expert, or None.
    """

    expert_ffn: FFN
    shared_ffn: FFN | None


def sum_chosen_experts(
    local_experts: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    c: Experts,
    tile: int,
) -> Float[Array, "tokens D"]:
    """Compute the weighted sum of each token's experts, all on this device, and add the shared expert's
    output."""
    mixed = weighted_sum(*run_routed_experts(local_experts.expert_ffn, c, x, weights, chosen, tile), x.dtype)
    return (
        mixed
        if local_experts.shared_ffn is None
        else mixed + run_shared_expert(local_experts.shared_ffn, c, x)
    )


def weighted_sum(
    outputs: Float[Array, "tokens A D"], weights: Float[Array, "tokens A"], dtype: Any
) -> Float[Array, "tokens D"]:
    """Add up weighted outputs in float32, in the order of the choices."""
    A = weights.shape[1]
    parts = (prevent_fma(outputs[:, i].astype(jnp.float32) * weights[:, i, None]) for i in range(A))
    return sum(parts, start=jnp.float32(0)).astype(dtype)


def run_shared_expert(w: FFN, c: Experts, x: Float[Array, "tokens D"]) -> Float[Array, "tokens D"]:
    """Run the shared expert."""
    return feed_forward(w, c.shared_ffn, x)


def run_routed_experts(
    expert_ffn: FFN,
    c: Experts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    tile: int,
) -> tuple[Float[Array, "tokens A D"], Float[Array, "tokens A"]]:
    """Return the outputs of each token's experts, and their weights.

    If the inputs are weighted, the returned weights are ones, and each choice counts as a token of its own.
    """
    if not c.weighs_inputs:
        return run_chosen_experts(expert_ffn, c, x, chosen, tile), weights
    inputs = (x[:, None].astype(jnp.float32) * weights[..., None]).astype(x.dtype)
    outputs = run_chosen_experts(expert_ffn, c, inputs.reshape(-1, x.shape[-1]), chosen.reshape(-1, 1), tile)
    return outputs.reshape(inputs.shape), jnp.ones_like(weights)


def run_chosen_experts(
    expert_ffn: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"], tile: int
) -> Float[Array, "tokens A D"]:
    """Run each token through each of its experts, by the method of the device.

    A choice beyond the experts is none, and its output is undefined.
    """
    if isinstance(expert_ffn, ExpertWeights):
        return expert_ffn.run_chosen(c, x, chosen)

    def run_ragged(x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]) -> Float[Array, "tokens A D"]:
        return run_experts_ragged(expert_ffn, c, x, chosen)

    return jax.lax.platform_dependent(
        x,
        chosen,
        tpu=run_ragged,
        default=lambda x, chosen: run_experts_tiled(expert_ffn, c, x, chosen, tile),
        **({"cuda": run_ragged} if has_expert_kernel(expert_ffn, x.dtype) else {}),
        **({"cpu": run_ragged} if has_cpu_expert_kernel(expert_ffn, x.dtype) else {}),
    )


@runtime_checkable
class ExpertWeights(Protocol):
    """A record that stands in the tree in place of experts: it routes tokens, and runs them."""

    def route(
        self, w: MoE, c: Experts, x: Float[Array, "tokens D"]
    ) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
        """Route tokens as `route_tokens`."""
        ...

    def run_chosen(
        self, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]
    ) -> Float[Array, "tokens A D"]:
        """Run each token through each of its experts, as `run_chosen_experts`."""
        ...


def has_expert_kernel(f: FFN, dtype: Any) -> bool:
    """Return True if a GPU kernel multiplies rows of this dtype with these experts, instead of
    `run_experts_tiled`."""
    weights = f.matrices
    shapes = [
        shape for w in weights for shape in (w.ragged_dot_shapes if isinstance(w, Weight) else (w.shape,))
    ]
    is_same_dtype = all(isinstance(w, Weight) or w.dtype == dtype for w in weights)
    coded = (w for w in map(base_weight, weights) if isinstance(w, InputQuantised))
    if not all(w.has_tile_kernel(dtype) for w in coded):
        return False
    return is_same_dtype and choose_expert_kernel(dtype, *shapes) is not None and not is_multi_device(weights)


def has_cpu_expert_kernel(f: FFN, dtype: Any) -> bool:
    """Return True if duetto's own CPU kernels multiply rows of this dtype with these experts."""
    weights = map(base_weight, f.matrices)
    return all(isinstance(w, Packed) and w.can_multiply(dtype, dtype) for w in weights)


def base_weight(w: Any) -> Any:
    """Return the part of a weight that all rows share."""
    return w.base if isinstance(w, PerRowWeight) else w


def route_tokens(
    w: MoE, c: Experts, x: Float[Array, "tokens D"]
) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
    """Return the weights and the numbers of each token's active experts, best first."""
    if isinstance(w.experts, ExpertWeights):
        return w.experts.route(w, c, x)
    logits = compute_router_logits(w, x)
    scores = compute_expert_scores(c, logits)
    # sigmoids near one are rounded to it, and would no longer rank experts
    ranking = add_bias(logits if c.weighs_inputs or c.corrects_logits else scores, w.correction)
    if c.groups > 1:
        ranking = jnp.where(mask_active_groups(c, ranking), ranking, -jnp.inf)
    _, chosen = jax.lax.top_k(ranking, c.active)
    return weigh_experts(w, c, scores, chosen), chosen.astype(jnp.int32)


def compute_router_logits(w: MoE, x: Float[Array, "tokens D"]) -> Float[Array, "tokens E"]:
    """Compute the router's logits in float32."""
    logits = einsum("td,de->te", x.astype(jnp.float32), w.router.astype(jnp.float32))
    return add_bias(logits, None if w.router_bias is None else w.router_bias.astype(jnp.float32))


def compute_expert_scores(c: Experts, logits: Float[Array, "tokens E"]) -> Float[Array, "tokens E"]:
    """Compute the scores of experts from the router's logits, which are the scores of a sparsemixer."""
    logits = apply_softcap(logits, c.router_softcap)
    if c.scoring == "sparsemixer":
        return logits
    return jax.nn.softmax(logits, axis=-1) if c.scoring == "softmax" else jax.nn.sigmoid(logits)


def weigh_experts(
    w: MoE, c: Experts, scores: Float[Array, "tokens E"], chosen: Int[Array, "tokens A"]
) -> Float[Array, "tokens A"]:
    """Return the weights of chosen experts from the scores of all."""
    if c.scoring == "sparsemixer":
        return weigh_sparsely(scores, chosen, c.jitter)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if c.normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    if w.scales is not None:
        weights = weights * w.scales.astype(jnp.float32)[chosen]
    return weights * c.factor


def weigh_sparsely(
    logits: Float[Array, "tokens E"], chosen: Int[Array, "tokens 2"], jitter: float
) -> Float[Array, "tokens 2"]:
    """Return the weights of two experts, as SparseMixer computes them (Liu et al., arXiv 2310.00811).

    Each is a softmax over the logits near its own, the second one's without the best expert.
    """
    best, second = jnp.split(jnp.take_along_axis(logits, chosen, axis=-1), 2, axis=-1)
    others = jnp.where(jnp.arange(logits.shape[1])[None] == chosen[:, :1], -jnp.inf, logits)

    def weigh(
        own: Float[Array, "tokens 1"], logits_left: Float[Array, "tokens E"]
    ) -> Float[Array, "tokens 1"]:
        is_far = (own - logits) / jnp.maximum(jnp.abs(logits), own) > 2 * jitter
        near = jnp.where(is_far, -jnp.inf, logits_left)
        return 1 / jnp.exp(near - own).sum(-1, keepdims=True)

    return jnp.concatenate([weigh(best, logits), weigh(second, others)], axis=-1)


def mask_active_groups(c: Experts, scores: Float[Array, "tokens E"]) -> Bool[Array, "tokens E"]:
    """Return the mask of the experts in active groups."""
    groups = scores.reshape(scores.shape[0], c.groups, -1)
    group_scores = groups.max(-1) if c.group_score == "best" else jax.lax.top_k(groups, 2)[0].sum(-1)
    _, best = jax.lax.top_k(group_scores, c.active_groups)
    active = (best[..., None] == jnp.arange(c.groups, dtype=best.dtype)[None, None]).any(1)
    return jnp.repeat(active, groups.shape[-1], axis=1)


def run_experts_ragged(
    f: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]
) -> Float[Array, "tokens A D"]:
    """Run each token through each of its experts, as products of consecutive rows with one expert each."""
    order, sizes = sort_by_expert(chosen, count_experts(f))
    expert, tokens = chosen.reshape(-1)[order], order // chosen.shape[1]
    f = map_instances(f, PerRowWeight, lambda w: w.select_tokens(tokens, len(x)))

    def multiply_rows(
        rows: Float[Array, "rows _"], weights: Any, bias: Float[Array, "E outputs"] | None
    ) -> Float[Array, "rows outputs"]:
        out = ragged_dot(rows, weights, sizes, expert)
        return out if bias is None else out + bias[expert]

    rows = x[tokens]
    gate = None if f.gate is None else multiply_rows(rows, f.gate, f.gate_bias)
    up = multiply_rows(rows, f.up, f.up_bias)
    out = multiply_rows(activate(c.expert_ffn, gate, up), f.down, f.down_bias)
    return out[jnp.argsort(order)].reshape(*chosen.shape, -1)


def sort_by_expert(chosen: Int[Array, "tokens A"], E: int) -> tuple[Int[Array, " rows"], Int[Array, " E"]]:
    """Sort choices by expert, then by token. Returns their numbers in that order, and the number of each
    expert's.

    Choices of E and beyond are of no expert, and come last. It takes one sort of distinct integers, and sums
    without a scatter, which a GPU would add up in any order.
    """
    flat, experts = chosen.reshape(-1), jnp.arange(E, dtype=jnp.int32)
    keys = flat * flat.size + jnp.arange(flat.size, dtype=jnp.int32)
    sizes = (flat[:, None] == experts[None]).sum(0, dtype=jnp.int32)
    return jax.lax.rem(jnp.sort(keys, stable=False), jnp.int32(flat.size)), sizes


def run_experts_tiled(
    f: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"], tile: int
) -> Float[Array, "tokens A D"]:
    """Run each token through each of its experts, as tiles of `tile` rows of one expert.

    An expert's last tile is padded. An expert without tokens has no tile.
    """
    assigned, E = chosen.reshape(-1), count_experts(f)
    order = jnp.argsort(assigned, stable=True)
    expert = assigned[order]
    count = jnp.bincount(assigned, length=E).astype(jnp.int32)
    tiles = (count + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    before = jnp.cumsum(count) - count  # rows of the experts before each one
    row = (ends - tiles)[expert] * tile + jnp.arange(expert.size, dtype=jnp.int32) - before[expert]
    max_tiles = expert.size // tile + min(E, expert.size)
    row = index_or_drop(row, expert < E, max_tiles * tile)
    rows = jnp.zeros((max_tiles * tile, x.shape[1]), x.dtype)
    token = order // chosen.shape[1]
    rows = rows.at[row].set(x[token], mode="drop", unique_indices=True)
    tokens = jnp.zeros(max_tiles * tile, jnp.int32).at[row].set(token, mode="drop", unique_indices=True)
    tile_experts = jnp.searchsorted(
        ends, jnp.arange(max_tiles, dtype=jnp.int32), side="right", method="compare_all"
    )

    def run_tile(i: Int[Array, ""], out: Float[Array, "rows D"]) -> Float[Array, "rows D"]:
        e, start = tile_experts[i], i * tile
        a = jax.lax.dynamic_slice_in_dim(rows, start, tile)
        tile_ffn = select_expert_ffn(f, e, jax.lax.dynamic_slice_in_dim(tokens, start, tile), len(x))
        return jax.lax.dynamic_update_slice_in_dim(out, feed_forward(tile_ffn, c.expert_ffn, a), start, 0)

    out = jax.lax.fori_loop(0, ends[-1], run_tile, jnp.zeros_like(rows))
    return out[row][jnp.argsort(order)].reshape(*chosen.shape, -1)


def select_expert_ffn(f: FFN, e: Int[Array, ""], tokens: Int[Array, " rows"], count: int) -> FFN:
    """Return expert e, for rows that are these tokens of `count`."""

    def select_weight(w: Any) -> Any:
        return w.select_expert(e).select_tokens(tokens, count) if isinstance(w, PerRowWeight) else w[e]

    return jax.tree.map(select_weight, f, is_leaf=lambda w: isinstance(w, PerRowWeight))


def count_experts(f: FFN) -> int:
    """Return E, the number of experts side by side."""
    return jax.tree.leaves(f)[0].shape[0]
