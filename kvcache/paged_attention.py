"""`attend` over pages: the interface between the model and the KV cache."""

from dataclasses import dataclass, replace
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from ..model.attention import AttentionParams, Keys, NewHeads, Values
from ..model.config import NormKind
from ..model.recurrent.kinds import STATE_WINDOW
from ..model.recurrent.states import Recurrence, RecurrentInputs
from .kernels import cpu_rope
from .kernels.attention import attend_with_kernels, has_attention_kernel
from .kernels.gpu_rope import gpu_rope_and_write, has_gpu_rope
from .kernels.tiles import LayerPages
from .pages import (
    Batch,
    KVCache,
    LayerPools,
    SlotMapping,
    attend_key_blocks,
    attend_packed_heads,
    compute_slot_mapping,
    read_kv_block,
    read_value_block,
    select_sparse_keys,
    with_layer_pool,
    write_kv,
    write_kv_to_slots,
)
from .states import StateRows, advance_states


def apply_rope_and_write(
    new_heads: NewHeads, pools: LayerPools, slot_mapping: SlotMapping, isa: str | None
) -> tuple[Float[Array, "B T N H"], LayerPools]:
    """Norm and rotate (RoPE) the queries and keys of new tokens, and write keys and values to their pages.
    One kernel does this on an NVIDIA GPU, or on a CPU with instruction set `isa`. Returns the queries and the
    pools."""

    def apply_unfused(new_heads: NewHeads, pools: LayerPools) -> tuple[Float[Array, "B T N H"], LayerPools]:
        """Rotate with XLA, then scatter keys and values to their pages."""
        q, k = new_heads.rotated_qk
        return q, write_kv_to_slots(pools, slot_mapping, k, new_heads.v)

    if isa is not None:
        kernel = partial(cpu_rope.cpu_rope_and_write, slot_mapping=slot_mapping, isa=isa)
        return jax.lax.platform_dependent(new_heads, pools, cpu=kernel, default=apply_unfused)
    kernel = partial(gpu_rope_and_write, slot_mapping=slot_mapping)
    return jax.lax.platform_dependent(new_heads, pools, cuda=kernel, default=apply_unfused)


def has_rope_kernel(
    q: Float[Array, "B T N head_size"], pools: LayerPools, norm: NormKind | None, isa: str | None
) -> bool:
    """True if a kernel can norm, rotate and write heads like these queries."""
    return has_gpu_rope(q, pools, norm) if isa is None else cpu_rope.has_cpu_rope(q, pools)


@dataclass(frozen=True)
class PagedAttend:
    """`attend` over a KVCache: writes new keys and values to their pages, then attends to all pages of each
    row. Recurrent layers advance their states from page to page.

    windows: window of each page table, in tokens; None is unlimited, STATE_WINDOW is for recurrent layers
    """

    batch: Batch
    windows: tuple[int | None, ...]

    def __call__(
        self,
        cache: KVCache,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        attention: AttentionParams,
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        batch, table = self.batch, self._page_table(attention.window)
        pools = cache.k[layer], cache.v[layer]
        keys, values = pools = pools if k is None else write_kv(pools, batch, table, k, v)

        def attend_blocks(q: Float[Array, "B T N H"]) -> Float[Array, "B T N U"]:
            """Attend without a kernel: read keys block by block with a running softmax."""
            read_index = partial(read_value_block, pools, table, q.dtype)
            selected_keys = select_sparse_keys(attention, batch, table, keys.shape[2], read_index)
            read = partial(read_kv_block, pools, table, attention, q.dtype)
            attend = partial(
                attend_key_blocks, batch=batch, read=read, attention=attention, selected_keys=selected_keys
            )
            return (
                attend(q)
                if attention.has_expanded_keys
                else attend_packed_heads(attend, q, keys, attention.num_kv_heads)
            )

        pages = LayerPages(*pools, table, batch.start, batch.count)
        out = attend_with_kernels(q, pages, attention, attend_blocks, cache.isa)
        new_pools = {"k": with_layer_pool(cache.k, layer, keys), "v": with_layer_pool(cache.v, layer, values)}
        return replace(cache, **new_pools), out

    def can_fuse_rope(
        self, cache: KVCache, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None
    ) -> bool:
        """True if a kernel can norm, rotate and write heads like these queries in one call."""
        return has_rope_kernel(q, (cache.k[layer], cache.v[layer]), norm, cache.isa)

    def attend_with_rope(
        self, cache: KVCache, layer: int, new_heads: NewHeads, attention: AttentionParams
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        """Norm, rotate and write new heads with one kernel, then attend to all pages. Returns the cache and
        the outputs."""
        table, pools = self._page_table(attention.window), (cache.k[layer], cache.v[layer])
        q, (k, v) = apply_rope_and_write(
            new_heads, pools, compute_slot_mapping(pools, self.batch, table), cache.isa
        )
        new_pools = {"k": with_layer_pool(cache.k, layer, k), "v": with_layer_pool(cache.v, layer, v)}
        return self(replace(cache, **new_pools), layer, q, None, None, attention)

    def can_read_latent_rows(
        self,
        cache: KVCache,
        layer: int,
        q: Float[jax.ShapeDtypeStruct, "B T N _"],
        attention: AttentionParams,
    ) -> bool:
        """True if a kernel reads a latent layer's rows in place."""
        return has_attention_kernel(q, (cache.k[layer], cache.v[layer]), attention)

    def run_recurrence(
        self, cache: KVCache, layer: int, recurrence: Recurrence, inputs: RecurrentInputs
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        """Advance a recurrent layer's states by the rows' new tokens. Returns the cache and the outputs."""
        pool, out = advance_states(cache.states[layer], self.state_rows, recurrence, inputs)
        return replace(cache, states=with_layer_pool(cache.states, layer, pool)), out

    @property
    def state_rows(self) -> StateRows:
        """Page table and lengths by which recurrent layers find the rows' states."""
        return StateRows(self.batch.start, self.batch.count, self._page_table(STATE_WINDOW))

    def _page_table(self, window: int | None) -> Int[Array, "B M"]:
        """Return the page table of the layers with this window."""
        return self.batch.page_tables[self.windows.index(window)]
