"""`attend` over pages: the seam between the model and the cache."""

from dataclasses import dataclass, replace
from functools import partial

import jax
from jaxtyping import Array, Float, Int

from ..model.attention import AttentionParams, Keys, NewHeads, Values
from ..model.config import NormKind
from ..model.recurrent.kinds import STATE
from ..model.recurrent.states import Recurrence, RecurrentInputs
from .kernels import cpu_turn
from .kernels.attention import attend_with, has_kernel
from .kernels.tiles import LayerPages
from .kernels.turn import has_turn, turn_and_write
from .pages import (
    Batch,
    KVCache,
    Places,
    Pools,
    choice,
    in_lanes,
    places_of,
    read_keys,
    read_values,
    running_softmax,
    stored,
    with_layer,
    written,
)
from .states import StateRows, taken_on


def turned(
    new: NewHeads, pools: Pools, place: Places, isa: str | None
) -> tuple[Float[Array, "B T N H"], Pools]:
    """Queries that are normed and turned, and pools with the keys and values: on an NVIDIA GPU by one kernel,
    on a CPU by that of an instruction set."""

    def plainly(new: NewHeads, pools: Pools) -> tuple[Float[Array, "B T N H"], Pools]:
        q, k = new.turned
        return q, written(pools, place, k, new.v)

    if isa is not None:
        kernel = partial(cpu_turn.turn_and_write, place=place, isa=isa)
        return jax.lax.platform_dependent(new, pools, cpu=kernel, default=plainly)
    kernel = partial(turn_and_write, place=place)
    return jax.lax.platform_dependent(new, pools, cuda=kernel, default=plainly)


def turns(q: Float[Array, "B T N own"], pools: Pools, norm: NormKind | None, isa: str | None) -> bool:
    """True if one of these kernels takes heads like these."""
    return has_turn(q, pools, norm) if isa is None else cpu_turn.has_turn(q, pools)


@dataclass(frozen=True)
class Paged:
    """`attend` over a KVCache: writes the rows' new keys and values into their pages, and reads these; takes
    states on from page to page."""

    batch: Batch
    windows: tuple[int | None, ...]

    def __call__(
        self,
        cache: KVCache,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        reading: AttentionParams,
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        batch, table = self.batch, self._table(reading.window)
        pools = cache.k[layer], cache.v[layer]
        keys, values = pools = pools if k is None else stored(pools, batch, table, k, v)

        def by_blocks(q: Float[Array, "B T N H"]) -> Float[Array, "B T N U"]:
            index = partial(read_values, pools, table, q.dtype)
            chosen = choice(reading, batch, table, keys.shape[2], index)
            read = partial(read_keys, pools, table, reading, q.dtype)
            attend = partial(running_softmax, batch=batch, read=read, reading=reading, chosen=chosen)
            return attend(q) if reading.makes_keys else in_lanes(attend, q, keys, reading.heads)

        pages = LayerPages(*pools, table, batch.start, batch.count)
        out = attend_with(q, pages, reading, by_blocks, cache.isa)
        own = {"k": with_layer(cache.k, layer, keys), "v": with_layer(cache.v, layer, values)}
        return replace(cache, **own), out

    def turns(self, cache: KVCache, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None) -> bool:
        """True if a kernel norms, turns and stores heads like these."""
        return turns(q, (cache.k[layer], cache.v[layer]), norm, cache.isa)

    def turned(
        self, cache: KVCache, layer: int, new: NewHeads, reading: AttentionParams
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        table, pools = self._table(reading.window), (cache.k[layer], cache.v[layer])
        q, (k, v) = turned(new, pools, places_of(pools, self.batch, table), cache.isa)
        own = {"k": with_layer(cache.k, layer, k), "v": with_layer(cache.v, layer, v)}
        return self(replace(cache, **own), layer, q, None, None, reading)

    def reads_rows(
        self, cache: KVCache, layer: int, q: Float[jax.ShapeDtypeStruct, "B T N _"], reading: AttentionParams
    ) -> bool:
        """True if a kernel reads a latent layer's rows in place."""
        return has_kernel(q, (cache.k[layer], cache.v[layer]), reading)

    def recur(
        self, cache: KVCache, layer: int, recurrence: Recurrence, new: RecurrentInputs
    ) -> tuple[KVCache, Float[Array, "B T N U"]]:
        pool, out = taken_on(cache.states[layer], self.rows, recurrence, new)
        return replace(cache, states=with_layer(cache.states, layer, pool)), out

    @property
    def rows(self) -> StateRows:
        """Where the rows' states are."""
        return StateRows(self.batch.start, self.batch.count, self._table(STATE))

    def _table(self, window: int | None) -> Int[Array, "B M"]:
        return self.batch.page_tables[self.windows.index(window)]
