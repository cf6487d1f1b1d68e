"""Attention to whole texts, computed over pages as an engine does, with the derivative of plain attention."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..kvcache.paged_attention import PagedAttend, has_rope_kernel
from ..kvcache.pages import Batch, KVCache
from ..kvcache.quantised import empty_pool
from ..model.attention import AttentionParams, Keys, NewHeads, Values, dot_product_attention
from ..model.config import NormKind

PAGE_SIZE = 64  # tokens of a page; no bit depends on it
Heads = NewHeads | tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]  # before rope, or keys and values


@dataclass(frozen=True)
class TrainableAttend:
    """`attend` over whole texts. Its state holds the heads of the layers so far, by layer number.

    lengths: number of tokens of each text.
    isa: instruction set of the CPU kernels that read pages.
    """

    lengths: Int[Array, " B"]
    isa: str

    def __call__(
        self,
        state: Any,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Keys | None,
        v: Values | None,
        attention: AttentionParams,
    ) -> tuple[Any, Float[Array, "B T N H"]]:
        assert v is not None or k is None, "latent layers are not covered"
        heads = state[layer] if k is None or v is None else (k, v)
        return {**(state or {}), layer: heads}, self._attend(q, heads, attention)

    def can_fuse_rope(
        self, state: Any, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None
    ) -> bool:
        """Return True if a kernel rotates heads like these queries."""
        return has_rope_kernel(q, make_pools((1, 1, PAGE_SIZE, q.shape[-1]), q.dtype), norm, self.isa)

    def attend_with_rope(
        self, state: Any, layer: int, new_heads: NewHeads, attention: AttentionParams
    ) -> tuple[Any, Float[Array, "B T N H"]]:
        """Norm, rotate and store new heads, and attend. Returns the new state and the attention's output."""
        return {**(state or {}), layer: new_heads}, self._attend(None, new_heads, attention)

    def _attend(
        self, q: Float[Array, "B T N H"] | None, heads: Heads, attention: AttentionParams
    ) -> Float[Array, "B T N H"]:
        plain = replace(attention, sinks=None)
        return attend_pages(plain, self.isa, q, heads, attention.sinks, self.lengths)


def make_pools(shape: tuple[int, int, int, int], dtype: Any) -> tuple[Any, Any]:
    """Make empty pools of keys and values for a CPU."""
    return tuple(empty_pool(shape, dtype, jax.devices("cpu")[0]) for _ in range(2))  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_pages(
    attention: AttentionParams,
    isa: str,
    q: Float[Array, "B T N H"] | None,
    heads: Heads,
    sinks: Float[Array, " N"] | None,
    lengths: Int[Array, " B"],
) -> Float[Array, "B T N H"]:
    """Write keys and values to the pages of a cache of one layer, and attend to them as an engine does.

    q: queries after rope; None: those of the new heads.
    """
    attention, v = replace(attention, sinks=sinks), heads.v if isinstance(heads, NewHeads) else heads[1]
    (B, T, K, H), M = v.shape, -(-v.shape[1] // PAGE_SIZE)
    keys, values = make_pools((K, B * M, PAGE_SIZE, H), v.dtype)
    table = jnp.arange(B * M, dtype=jnp.int32).reshape(B, M)
    rows = jnp.arange(B, dtype=jnp.int32)
    batch = Batch(jnp.zeros((B, T), jnp.int32), jnp.zeros_like(rows), lengths, (table,), rows)
    attend, cache = PagedAttend(batch, (attention.window,)), KVCache((keys,), (values,), isa=isa)
    if not isinstance(heads, NewHeads):
        assert q is not None
        return attend(cache, 0, q, *heads, attention)[1]
    cache, out = attend.attend_with_rope(cache, 0, heads, attention)
    return out if q is None else attend(cache, 0, q, None, None, attention)[1]


def attend_plainly(
    attention: AttentionParams, q: Float[Array, "B T N H"] | None, heads: Heads, sinks: Any
) -> Float[Array, "B T N H"]:
    """Attend without a cache: the function that is differentiated."""
    if isinstance(heads, NewHeads):
        rotated, k = heads.rotated_qk
        q, v = rotated if q is None else q, heads.v
    else:
        k, v = heads
    assert q is not None
    positions = jnp.arange(v.shape[1], dtype=jnp.int32)
    mask = attention.mask(positions[None, :, None], positions[None, None, :])
    return dot_product_attention(q, k, v, mask, replace(attention, sinks=sinks))


def _attend_backward(attention: AttentionParams, isa: str, operands: Any, g: Any) -> Any:
    *others, _ = operands
    return *jax.vjp(partial(attend_plainly, attention), *others)[1](g), None


attend_pages.defvjp(
    lambda attention, isa, *operands: (attend_pages(attention, isa, *operands), operands), _attend_backward
)
