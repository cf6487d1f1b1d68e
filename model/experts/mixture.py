"""Mixtures of experts: a router in float32, and only the chosen experts' products (Shazeer et al., arXiv
1701.06538).

Tokens are sorted by expert. A TPU multiplies the sorted rows with `jax.lax.ragged_dot`, an NVIDIA GPU with a
kernel that `model/weights/grouped.py` chooses, a CPU with duetto's own kernels where its weights are
`Packed`; elsewhere, where XLA (of jax 0.10) computes all experts for `ragged_dot`, we go through tiles of
rows of one expert (as MegaBlocks does, Gale et al., arXiv 2211.15841). A token's bits depend on neither its
neighbours nor their number: all tiles of a step have one size, and a row of a product knows nothing of the
others.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..config import Experts
from ..ffn import FFN, activate, feed_forward, ffn_spec
from ..layers import Norm, RowWeight, Weight, apart, biased, einsum, norm_spec, ragged_product
from ..sharding import on_several_devices
from ..tree import Spec, is_spec, pytree, static, unwrapped
from ..weights.cpu.panels import Packed
from ..weights.grouped import expert_kernel


@pytree
class MoE:
    """A router, E experts side by side, and the expert that every token goes to; what the family does not
    have is None."""

    router: Any  # [D,E]
    experts: FFN  # each leaf with E before its axes
    router_bias: Any = None  # [E]
    correction: Any = None  # [E]
    shared: FFN | None = None
    scales: Any = None  # [E]
    norms: Any = None  # Norms, where the layer's input comes as it is
    parts: Any = static(None)  # a `Parts` where devices share the layer


@pytree
class Norms:
    """Norms of what the router, the experts and the shared one are given, and of what the latter two make."""

    router: Norm
    experts: Norm
    shared: Norm
    experts_post: Norm
    shared_post: Norm


def experts_spec(c: Experts, D: int, depth: int) -> MoE:
    """The parameters of one layer of `depth`."""
    E = c.count

    def stacked(spec: Spec) -> Spec:
        axes = tuple("expert_ffn" if name == "ffn" else name for name in spec.axes)
        return replace(spec, shape=(E, *spec.shape), axes=("experts", *axes))

    return MoE(
        router=Spec((D, E), ("model", "scores")),
        experts=jax.tree.map(stacked, ffn_spec(c.each, D, depth), is_leaf=is_spec),
        router_bias=Spec((E,), ("scores",), scale=0.0) if c.router_bias else None,
        correction=Spec((E,), ("scores",), scale=0.0, dtype=jnp.float32) if c.correction else None,
        shared=ffn_spec(c.everyone, D, depth) if c.shared else None,
        scales=Spec((E,), ("scores",), mean=1.0, scale=0.0) if c.scales else None,
        norms=Norms(*[norm_spec(c.norms, D)] * 5) if c.norms else None,
    )


class LocalExperts(NamedTuple):
    """The experts that a device has."""

    experts: FFN  # each leaf with E before its axes
    shared: FFN | None


def add_all(
    held: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    c: Experts,
    tile: int,
) -> Float[Array, "tokens D"]:
    """The weighted sum of each token's experts, all of which are here, and the shared one's output."""
    mixed = weighted(*weighed_experts(held.experts, c, x, weights, chosen, tile), x.dtype)
    return mixed if held.shared is None else mixed + shared_output(held.shared, c, x)


def weighted(
    outputs: Float[Array, "tokens A D"], weights: Float[Array, "tokens A"], dtype: Any
) -> Float[Array, "tokens D"]:
    parts = (outputs[:, i].astype(jnp.float32) * weights[:, i, None] for i in range(weights.shape[1]))
    return sum(parts, start=jnp.float32(0)).astype(dtype)


def shared_output(w: FFN, c: Experts, x: Float[Array, "tokens D"]) -> Float[Array, "tokens D"]:
    return feed_forward(w, c.everyone, x)


def weighed_experts(
    experts: FFN,
    c: Experts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    tile: int,
) -> tuple[Float[Array, "tokens A D"], Float[Array, "tokens A"]]:
    """Outputs of each token's experts, and their weights. Where inputs are weighted these are ones, and each
    choice is a token of its own."""
    if not c.weighs_inputs:
        return each_expert(experts, c, x, chosen, tile), weights
    inputs = (x[:, None].astype(jnp.float32) * weights[..., None]).astype(x.dtype)
    outputs = each_expert(experts, c, inputs.reshape(-1, x.shape[-1]), chosen.reshape(-1, 1), tile)
    return outputs.reshape(inputs.shape), jnp.ones_like(weights)


def each_expert(
    experts: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"], tile: int
) -> Float[Array, "tokens A D"]:
    """Each token through each of its experts, in the way of the device. A choice beyond the experts is none,
    its output any."""

    def products(x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]) -> Float[Array, "tokens A D"]:
        return by_ragged_products(experts, c, x, chosen)

    return jax.lax.platform_dependent(
        x,
        chosen,
        tpu=products,
        default=lambda x, chosen: by_tiles(experts, c, x, chosen, tile),
        **({"cuda": products} if has_kernel(experts, x.dtype) else {}),
        **({"cpu": products} if has_cpu_kernel(experts, x.dtype) else {}),
    )


def has_kernel(f: FFN, dtype: Any) -> bool:
    """True if a GPU kernel multiplies rows of this dtype with these experts, without `by_tiles`."""
    weights = f.gate, f.up, f.down
    shapes = [shape for w in weights for shape in (w.factors if isinstance(w, Weight) else (w.shape,))]
    alike = all(isinstance(w, Weight) or w.dtype == dtype for w in weights)
    return alike and expert_kernel(dtype, *shapes) is not None and not on_several_devices(weights)


def has_cpu_kernel(f: FFN, dtype: Any) -> bool:
    """True if duetto's own CPU kernels multiply rows of this dtype with these experts."""
    weights = (w.base if isinstance(w, RowWeight) else w for w in (f.gate, f.up, f.down))
    return all(isinstance(w, Packed) and w.multiplies(dtype, dtype) for w in weights)


def route(
    w: MoE, c: Experts, x: Float[Array, "tokens D"]
) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
    """Weights and numbers of the active experts of each token, best first."""
    logits = einsum("td,de->te", x.astype(jnp.float32), w.router.astype(jnp.float32))
    logits = biased(logits, None if w.router_bias is None else w.router_bias.astype(jnp.float32))
    scores = jax.nn.softmax(logits, axis=-1) if c.scoring == "softmax" else jax.nn.sigmoid(logits)
    # scores near one are rounded to it, and would no longer tell experts apart
    wanted = logits if c.weighs_inputs else biased(scores, w.correction)
    if c.groups > 1:
        wanted = jnp.where(in_best_groups(c, wanted), wanted, -jnp.inf)
    _, chosen = jax.lax.top_k(wanted, c.active)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if c.normalised:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    if w.scales is not None:
        weights = weights * w.scales.astype(jnp.float32)[chosen]
    return weights * c.factor, chosen.astype(jnp.int32)


def in_best_groups(c: Experts, scores: Float[Array, "tokens E"]) -> Bool[Array, "tokens E"]:
    """Which experts are in one of the active groups."""
    groups = scores.reshape(scores.shape[0], c.groups, -1)
    of_group = groups.max(-1) if c.group_score == "best" else jax.lax.top_k(groups, 2)[0].sum(-1)
    _, best = jax.lax.top_k(of_group, c.active_groups)
    active = (best[..., None] == jnp.arange(c.groups, dtype=best.dtype)[None, None]).any(1)
    return jnp.repeat(active, groups.shape[-1], axis=1)


def by_ragged_products(
    f: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]
) -> Float[Array, "tokens A D"]:
    """Each token through each of its experts, as products of consecutive rows with one expert each."""
    order, sizes = sorted_by_expert(chosen, count_of(f))
    expert, tokens = chosen.reshape(-1)[order], order // chosen.shape[1]
    f = unwrapped(f, RowWeight, lambda w: w.of_tokens(tokens, len(x)))

    def product(
        rows: Float[Array, "rows _"], weights: Any, bias: Float[Array, "E outputs"] | None
    ) -> Float[Array, "rows outputs"]:
        out = ragged_product(rows, weights, sizes, expert)
        return out if bias is None else out + bias[expert]

    rows = x[tokens]
    gate, up = product(rows, f.gate, f.gate_bias), product(rows, f.up, f.up_bias)
    out = product(activate(c.each, gate, up), f.down, f.down_bias)
    return out[jnp.argsort(order)].reshape(*chosen.shape, -1)


def sorted_by_expert(chosen: Int[Array, "tokens A"], E: int) -> tuple[Int[Array, " rows"], Int[Array, " E"]]:
    """The numbers of the choices, expert by expert in order of tokens, and how many each expert has; choices
    of none, E and beyond, come last.

    One sort of whole numbers that differ, and sums without a scatter, which GPUs would add up in any order.
    """
    flat, experts = chosen.reshape(-1), jnp.arange(E, dtype=jnp.int32)
    keys = flat * flat.size + jnp.arange(flat.size, dtype=jnp.int32)
    sizes = (flat[:, None] == experts[None]).sum(0, dtype=jnp.int32)
    return jax.lax.rem(jnp.sort(keys, stable=False), jnp.int32(flat.size)), sizes


def by_tiles(
    f: FFN, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"], tile: int
) -> Float[Array, "tokens A D"]:
    """The same through tiles of rows of one expert; the last is padded, one without tokens has none."""
    assigned, E = chosen.reshape(-1), count_of(f)
    order = jnp.argsort(assigned, stable=True)
    expert = assigned[order]
    count = jnp.bincount(assigned, length=E).astype(jnp.int32)
    tiles = (count + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    before = jnp.cumsum(count) - count  # rows of the experts before each one
    row = (ends - tiles)[expert] * tile + jnp.arange(expert.size, dtype=jnp.int32) - before[expert]
    most = expert.size // tile + min(E, expert.size)
    row = apart(row, expert < E, most * tile)
    rows = jnp.zeros((most * tile, x.shape[1]), x.dtype)
    token = order // chosen.shape[1]
    rows = rows.at[row].set(x[token], mode="drop", unique_indices=True)
    tokens = jnp.zeros(most * tile, jnp.int32).at[row].set(token, mode="drop", unique_indices=True)
    owner = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right", method="compare_all")

    def one(i: Int[Array, ""], out: Float[Array, "rows D"]) -> Float[Array, "rows D"]:
        e, start = owner[i], i * tile
        a = jax.lax.dynamic_slice_in_dim(rows, start, tile)
        own = one_expert(f, e, jax.lax.dynamic_slice_in_dim(tokens, start, tile), len(x))
        return jax.lax.dynamic_update_slice_in_dim(out, feed_forward(own, c.each, a), start, 0)

    out = jax.lax.fori_loop(0, ends[-1], one, jnp.zeros_like(rows))
    return out[row][jnp.argsort(order)].reshape(*chosen.shape, -1)


def one_expert(f: FFN, e: Int[Array, ""], tokens: Int[Array, " rows"], count: int) -> FFN:
    """Expert e, for rows that are these tokens of `count`."""

    def own(w: Any) -> Any:
        return w.of_expert(e).of_tokens(tokens, count) if isinstance(w, RowWeight) else w[e]

    return jax.tree.map(own, f, is_leaf=lambda w: isinstance(w, RowWeight))


def count_of(f: FFN) -> int:
    """E of experts side by side."""
    return jax.tree.leaves(f)[0].shape[0]
