"""The kernels that an engine would use on an NVIDIA GPU or a TPU, each with small arrays of the engine's own
sizes and its reference."""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ....kvcache.kernels import attention, hopper_attention, memory, tpu_attention, turn
from ....kvcache.kernels.hopper_attention import HOPPER_PREFILL
from ....kvcache.kernels.tiles import LayerPages
from ....kvcache.pages import NO_LANES, Batch, in_lanes, pooled, read_keys, running_softmax, written
from ....kvcache.quantised import empty_pool, encoded, kept_as
from ....model.attention import AttentionParams, NewHeads, turns_plainly
from ....model.config import GroupedQuery, Latent, ModelConfig
from ....model.experts import MoE
from ....model.gpus import HOPPER, Kernel, gpu, on_tpu, refusal, without
from ....model.layers import Weight, einsum
from ....model.recurrent.kinds import DeltaNet, Mamba
from ....model.recurrent.linear import Terms, step
from ....model.rope import rotation
from ....model.transformer import Decoder
from ....model.weights import expert_tiles, fixed, grouped, nibbles
from ....model.weights.adapted import unadapted
from ....model.weights.compress import CONTRACTED
from ....model.weights.prepared import Lanes, lanes_of
from ....model.weights.quant import Quantised, by_kernel, ragged_by_kernel
from ...runtime.compiled.shapes import Sizes

BEFORE, CHUNK = (150, 7), 96  # tokens in the cache of two rows, and of each in a prefill
LONG = 160  # of each in a prefill whose heads a Hopper's kernel takes one by one
MANY = 5000  # of the first of them where kernels are not interpreted: several blocks and parts
EXPERTS = 4  # that a product of experts is checked with, at most


class KernelCase(NamedTuple):
    """A kernel with sizes of the engine. `run` and `reference` are given the same `inputs`, which are made
    only for a check; `reason` says why programs do not use the kernel anyway."""

    kernel: Kernel
    sizes: str
    reason: str | None
    inputs: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.name} {self.sizes}"


def kernel_cases(config: ModelConfig, params: Decoder, sizes: Sizes) -> Iterator[KernelCase]:
    """Yield the cases of an engine; there are none but on an NVIDIA GPU or a TPU, which has attention's
    alone."""
    dtype = params.embed.dtype
    mixers = dict.fromkeys(mixer for kind in config.layers for mixer in kind.mixers)
    if gpu() is not None or on_tpu():
        lanes = lanes_of(params.embed.sharding.device_set, sizes.shards) if on_tpu() else NO_LANES
        for mixer in mixers:
            if isinstance(mixer, GroupedQuery | Latent):
                yield from attention_cases(mixer, sizes, dtype, lanes)
    if gpu() is None:
        return
    for mixer in mixers:
        if isinstance(mixer, GroupedQuery) and turns_plainly(mixer):
            yield from turning_cases(mixer, sizes, dtype)
        elif isinstance(mixer, DeltaNet | Mamba):
            yield from memory_cases(mixer)
    yield from expert_cases(params, dtype)
    yield from weight_cases(params, dtype)


def numbers(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def attention_cases(
    mixer: GroupedQuery | Latent, sizes: Sizes, dtype: Any, lanes: Lanes
) -> Iterator[KernelCase]:
    if isinstance(mixer, Latent):
        N, K, H = mixer.num_heads, 1, mixer.rank + mixer.rope_size
        first = partial(first_numbers, mixer.rank)
        reading = AttentionParams(H**-0.5, expand=first, rank=mixer.rank)
    else:
        N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_size
        sinks = jnp.asarray(np.linspace(-1, 1, N), dtype) if mixer.sinks else None
        reading = AttentionParams(H**-0.5, mixer.window, mixer.softcap, sinks, chunked=mixer.chunked, heads=K)
    kept = sizes.kv_cache_dtype
    row = pooled(K, H, kept_as(kept, dtype), lanes)
    what = f"{N}/{K} heads of {H}, {dtype}, pages of {sizes.page_size}"
    what += "" if kept == "auto" else f", {kept}"
    known = {"window": reading.window, "softcap": reading.softcap}
    what += "".join(f", {name} {value:g}" for name, value in known.items() if value is not None)
    what += ", sinks" * (reading.sinks is not None) + ", chunked" * reading.chunked
    for T in (1, CHUNK, LONG):
        inputs = partial(attention_inputs, (T, N, H), row, sizes.page_size, kept, dtype, reading)
        q, pages = jax.eval_shape(inputs)
        for kernel, reason in attention_kernels(q, pages, reading):
            if T == LONG and kernel != HOPPER_PREFILL:
                continue
            run = partial(by_pages, reading=reading, kernel=kernel)
            tokens = f", {T} tokens" * (T == LONG)
            reference = partial(by_blocks, reading=reading)
            yield KernelCase(kernel, what + tokens, reason, inputs, run, reference)


def attention_kernels(
    q: Any, pages: LayerPages, reading: AttentionParams
) -> Iterator[tuple[Kernel, str | None]]:
    """Yield the kernels that read these pages, the first choice first, and why programs do not use them
    anyway."""
    if on_tpu():
        if tpu_attention.supported(q, pages, reading):
            own = tpu_attention.kernel_of(q.shape[1])
            yield own, refusal(own)
        return
    here = gpu()
    if here and here.capability == HOPPER and hopper_attention.supported(q, *pages[:2], reading):
        yield HOPPER_PREFILL, refusal(HOPPER_PREFILL)
    if attention.supported(q, *pages[:2], reading):
        yield attention.kernel_of(q.shape[1], reading), attention.refusal_of(q, *pages[:2], reading)


def first_numbers(rank: int, rows: Array, _: Array) -> tuple[Array, Array]:
    return rows, rows[..., :rank]


def on_cpu() -> bool:
    """True where a kernel can only be interpreted."""
    own: Any = jax.config.values["jax_default_device"] or jax.local_devices()[0]
    return getattr(own, "platform", own) == "cpu"  # the setting may be a platform's name


def attention_inputs(
    of: tuple[int, int, int],
    row: tuple[int, int],
    W: int,
    kept: str,
    dtype: Any,
    reading: AttentionParams,
) -> tuple[Array, LayerPages]:
    """Queries of two rows, the second shorter, and random pages in a random order; a token has rows in the
    pool, and numbers in each. Those behind the last token are no numbers."""
    (T, N, H), (K, size), before = of, row, BEFORE if on_cpu() else (MANY, BEFORE[1])
    B, M = len(before), -(-(max(before) + T) // W)
    q, P, tokens = numbers(0, (B, T, N, H), dtype), B * M, (T, max(1, T - 9))
    table = np.random.default_rng(0).permutation(P).reshape(B, M)
    written = np.zeros((P, W), bool)
    written[table] = (np.arange(M * W) < np.add(before, tokens)[:, None]).reshape(B, M, W)
    drawn = (numbers(seed, (K, P, W, size), dtype) for seed in (1, 2))
    empty = empty_pool((1, 1, 1, size), kept_as(kept, dtype))
    k, v = (encoded(empty, jnp.where(written[None, ..., None], x, jnp.nan)) for x in drawn)
    pages, start, count = (jnp.asarray(x, jnp.int32) for x in (table, before, tokens))
    return q, LayerPages(k, v if reading.rank is None else None, pages, start, count)


def by_pages(q: Array, pages: LayerPages, reading: AttentionParams, kernel: Kernel) -> Array:
    """Attention by the kernel."""

    def attend(q: Array) -> Array:
        if on_tpu():
            return tpu_attention.attend_pages(q, pages, reading, on_cpu())
        with without({HOPPER_PREFILL.name} - {kernel.name}):
            return attention.attend_pages(q, pages, reading, on_cpu())

    return real(in_lanes(attend, q, pages.k, reading.heads), pages)


def real(out: Array, pages: LayerPages) -> Array:
    """The outputs [B,T,N,U] of real tokens, and zeros."""
    is_real = jnp.arange(out.shape[1])[None] < pages.count[:, None]
    return jnp.where(is_real[..., None, None], out, 0)


def by_blocks(q: Array, pages: LayerPages, reading: AttentionParams) -> Array:
    """Attention by the reference."""
    start, count, table = pages.start, pages.count, pages.table
    batch = Batch(jnp.zeros(q.shape[:2], jnp.int32), start, count, (table,), start)
    read = partial(read_keys, pages[:2], table, reading, q.dtype)
    attend = partial(running_softmax, batch=batch, read=read, reading=reading)
    return jax.jit(lambda q: real(in_lanes(attend, q, pages.k, reading.heads).astype(q.dtype), pages))(q)


def turning_cases(mixer: GroupedQuery, sizes: Sizes, dtype: Any) -> Iterator[KernelCase]:
    """New heads of three tokens, one of which is not written, with the norms and the turn of a layer."""
    N, K, H, W = mixer.num_heads, mixer.num_kv_heads, mixer.head_size, sizes.page_size
    rope, norm = mixer.rope, mixer.qk_norm
    assert rope is not None

    def inputs() -> tuple[Any, ...]:
        at, page, offset = (
            jnp.asarray(x, jnp.int32)[:, None] for x in ((5, 0, 999), (2, 0, 9), (W - 1, 0, 1))
        )
        gains = (numbers(1, (H,), dtype), numbers(2, (H,), dtype)) if norm and norm.gain else (None, None)
        q, k, v = (numbers(seed, (3, 1, n, H), dtype) for seed, n in ((0, N), (5, K), (6, K)))
        new = NewHeads(q, k, v, rotation(at, rope, mixer.turned), gains, norm)
        return new, tuple(numbers(seed, (K, 4, W, H), dtype) for seed in (3, 4)), (page, offset)

    pool = jax.eval_shape(lambda: empty_pool((K, 4, W, H), kept_as(sizes.kv_cache_dtype, dtype)))
    if turn.takes(jax.ShapeDtypeStruct((3, 1, N, H), dtype), (pool, pool), norm):
        what = f"{N}/{K} heads of {H}, {mixer.turned} turned, {dtype}" + ", normed" * (norm is not None)
        yield KernelCase(turn.TURN, what, refusal(turn.TURN), inputs, turned_at_once, turned_apart)


def turned_at_once(new: NewHeads, pools: tuple[Array, Array], place: tuple[Array, Array]) -> Array:
    """Queries and pools as numbers of one array, by the kernel."""
    q, pools = turn.turn_and_write(new, pools, place, on_cpu())
    return jnp.concatenate([x.reshape(-1) for x in (q, *pools)])


def turned_apart(new: NewHeads, pools: tuple[Array, Array], place: tuple[Array, Array]) -> Array:
    """The same by the reference."""
    q, k = new.turned
    found: Any = written(pools, place, k, new.v)
    return jnp.concatenate([x.reshape(-1) for x in (q, *found)])


def memory_cases(mixer: DeltaNet | Mamba) -> Iterator[KernelCase]:
    """A step of two rows' memories, one of which has none before it."""
    assert mixer.state.memory is not None
    (N, H, U), B = mixer.state.memory, 2
    is_delta, by_dimension = isinstance(mixer, DeltaNet), getattr(mixer, "decay_rank", None) is not None

    def inputs() -> tuple[Any, ...]:
        decay = jax.nn.sigmoid(numbers(1, (B, N, H) if by_dimension else (B, N)))
        q, k, v = (numbers(i, (B, N, size)) / size**0.5 for i, size in ((2, H), (3, H), (4, U)))
        x = Terms(q, k, v, decay, jax.nn.sigmoid(numbers(5, (B, N))) if is_delta else None)
        source, target = (jnp.asarray(pages, jnp.int32) for pages in ([1, -1], [2, 0]))
        return numbers(0, (N, 2 * B, H, U)), memory.StatePages(source, target), x

    if {H, U} <= set(memory.SIZES):
        what, reason = f"{N} heads of {H}x{U}", refusal(memory.STEP)
        yield KernelCase(memory.STEP, what, reason, inputs, step_in_place, step_apart)


def step_in_place(pool: Array, place: memory.StatePages, x: Terms) -> Array:
    """New memories and outputs as numbers of one array, by the kernel."""
    new, out = memory.step_pages(pool, place, x, on_cpu())
    return jnp.concatenate([new[:, place.target].reshape(-1), out.reshape(-1)])


def step_apart(pool: Array, place: memory.StatePages, x: Terms) -> Array:
    """The same by the reference."""
    before = pool[:, jnp.maximum(place.source, 0)]
    new, out = step(jnp.where((place.source >= 0)[None, :, None, None], before, 0.0), x)
    return jnp.concatenate([new.reshape(-1), out.reshape(-1)])


def expert_cases(params: Decoder, dtype: Any) -> Iterator[KernelCase]:
    """The products of the experts, or the parts of them, that a device has, each kernel and size once."""
    cases: dict[str, KernelCase] = {}
    layers = jax.tree.leaves(unadapted(params), is_leaf=lambda x: isinstance(x, MoE))
    experts = [layer.experts for layer in layers if isinstance(layer, MoE)]
    for w in (w for f in experts for w in (f.gate, f.up, f.down)) if dtype.itemsize == 2 else ():
        own = jax.tree.map(on_a_device, w)
        shapes = own.factors if isinstance(own, Weight) else (own.shape,)
        found = [case for shape in shapes for case in matrix_cases(shape, dtype)]
        if isinstance(own, Quantised) and (case := codes_case(own, dtype)) is not None:
            # jax's kernel stands in where ours is refused; ours is given codes, never these matrices
            found = [case, *(other for other in found if other.kernel != case.kernel)]
        cases |= {case.name: case for case in found if case.name not in cases}
    yield from cases.values()


def on_a_device(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape that a device has of an array, or of its shape."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype)


def counts_of(E: int) -> list[int]:
    """Rows of some of E experts, one of which has none."""
    return [3, 0, 5, 2][: min(E, EXPERTS)]


def matrix_cases(shape: tuple[int, ...], dtype: Any) -> Iterator[KernelCase]:
    """Matrices [E,D,F] by our kernel, and by jax's where it could stand in."""
    counts, what = counts_of(shape[0]), f"{shape[1]}x{shape[2]}, {dtype}"
    few = len(counts), *shape[1:]

    def inputs() -> tuple[Any, ...]:
        x = numbers(0, (sum(counts), shape[1]), dtype)
        return x, numbers(1, few, dtype), jnp.asarray(counts, jnp.int32)

    def tiled(x: Array, w: Array, sizes: Array) -> Array:
        return expert_tiles.multiply(x, expert_tiles.ExpertMatrices(w), sizes, interpret=on_cpu())

    own, reason = expert_tiles.EXPERTS, None
    if not expert_tiles.can_tile(dtype, few):
        reason = refusal(own) or "it needs multiples of 64"
    yield KernelCase(own, what, reason, inputs, tiled, jax.lax.ragged_dot)
    if grouped.can_multiply(dtype, few):
        yield KernelCase(grouped.GROUPED, what, None, inputs, grouped.grouped_product, jax.lax.ragged_dot)


def codes_case(w: Quantised, dtype: Any) -> KernelCase | None:
    """Random codes of experts of these sizes, or None where they are widened for the kernel of matrices."""
    shape, counts = w.shape, counts_of(w.shape[0])
    codes = expert_tiles.ExpertMatrices(w.values, w.scales, w.zeros)
    if not expert_tiles.can_widen(codes, w.scheme, shape, w.packed, dtype):
        return None

    def inputs() -> tuple[Any, ...]:
        E, (values, scales, zeros) = len(counts), codes
        bits = jax.random.bits(jax.random.key(1), (E, *values.shape[1:]), jnp.uint8)
        drawn = bits if values.dtype == bits.dtype else (numbers(1, bits.shape) * 32).astype(values.dtype)
        ones = jnp.ones((E, *scales.shape[1:]), scales.dtype)
        eights = None if zeros is None else jnp.full(ones.shape, nibbles.ZERO, zeros.dtype)
        own = Quantised(drawn, ones, eights, w.scheme, w.packed)
        return numbers(0, (sum(counts), shape[1]), dtype), own, jnp.asarray(counts, jnp.int32)

    def run(x: Array, own: Quantised, sizes: Array) -> Array:
        return ragged_by_kernel(x, own, sizes, interpret=on_cpu())

    def reference(x: Array, own: Quantised, sizes: Array) -> Array:
        return jax.lax.ragged_dot(x, own.widened(dtype), sizes)

    scales = f"{'x'.join(map(str, w.scales.shape[1:]))} scales in {w.scales.dtype}"
    what = f"{shape[1]}x{shape[2]}, {dtype}, {w.scheme}, {scales}{', zeros' if w.zeros is not None else ''}"
    return KernelCase(expert_tiles.EXPERTS, what, None, inputs, run, reference)


def weight_cases(params: Decoder, dtype: Any) -> Iterator[KernelCase]:
    """The products of weights that stand in the tree as records, each tiling once."""
    cases: dict[str, KernelCase] = {}
    flat, _ = jax.tree_util.tree_flatten_with_path(unadapted(params), is_leaf=is_record)
    for path, w in flat:
        name = jax.tree_util.keystr(path, simple=True, separator=".").rpartition(".")[2]
        if is_record(w) and name in CONTRACTED:
            shape = w.array.shape if isinstance(w, fixed.Fixed) else w.shape
            inputs = len(CONTRACTED[name]) if len(shape) + CONTRACTED[name][0] == 0 else 0
            case = fixed_case(w, inputs) if isinstance(w, fixed.Fixed) else int4_case(w, inputs, dtype)
            if case is not None:
                cases.setdefault(case.name, case)
    yield from cases.values()


def is_record(x: Any) -> bool:
    return isinstance(x, Quantised | fixed.Fixed)


def int4_case(w: Quantised, inputs: int, dtype: Any) -> KernelCase | None:
    """A weight of these sizes with random codes, and scales of one, behind three rows."""
    shape, kernel = w.shape, nibbles.NIBBLES

    def made() -> tuple[Any, ...]:
        codes = jax.random.bits(jax.random.key(1), w.values.shape, jnp.uint8)
        scales = jnp.ones(w.scales.shape, w.scales.dtype)
        zeros = None if w.zeros is None else jnp.full(w.zeros.shape, nibbles.ZERO, w.zeros.dtype)
        own = Quantised(codes.astype(w.values.dtype), scales, zeros, w.scheme, w.packed)
        return numbers(0, (3, *shape[:inputs]), dtype), own

    @jax.jit
    def reference(x: Array, own: Quantised) -> Array:
        inner = prod(shape[:inputs])
        product = einsum("rd,df->rf", x.reshape(3, inner), own.widened(dtype).reshape(inner, -1))
        return product.reshape(3, *shape[inputs:])

    def takes(x: Array, own: Quantised) -> bool:
        return own.has_kernel(x, inputs)

    found: list[bool] = []
    if w.scheme == "int4":
        jax.eval_shape(lambda: found.append(takes(*made())))
    run = jax.jit(partial(by_kernel, inputs=inputs, dtype=dtype))
    scales = f"scales {'x'.join(map(str, w.scales.shape))} in {w.scales.dtype}"
    what = f"{'x'.join(map(str, shape))}, {dtype}, {scales}{', zeros' if w.zeros is not None else ''}"
    return KernelCase(kernel, what, refusal(kernel), made, run, reference) if any(found) else None


def fixed_case(w: fixed.Fixed, inputs: int) -> KernelCase | None:
    """A small product in the tiles of a weight; those of logits where it sums over its last axis."""
    shape, dtype, kernel = w.array.shape, w.array.dtype, fixed.FIXED
    tiles = fixed.tiles_of(prod(shape[:inputs]), prod(shape[inputs:])) if inputs else fixed.TALL
    if tiles is None:
        return None
    inner, columns = 8 * tiles.depth, 4 * fixed.WARPGROUPS * fixed.ROWS
    wide = (inner, columns) if inputs else (columns, inner)

    def made() -> tuple[Any, ...]:
        return numbers(0, (3, inner), dtype), numbers(1, wide, dtype)

    run: Any = partial(fixed.in_rows, inputs=1, tiles=tiles) if inputs else fixed.in_columns
    reference = partial(einsum, "rd,df->rf") if inputs else partial(einsum, fixed.LOGITS, dtype=jnp.float32)
    reason = refusal(kernel)
    if reason is None and fixed.shipped(fixed.KERNEL) is None:
        reason = "jax's module, or absl, is missing"
    return KernelCase(kernel, f"{tiles.label}, {dtype}", reason, made, run, reference)
