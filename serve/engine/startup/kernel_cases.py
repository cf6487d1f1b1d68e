"""The kernels that an engine would use on an NVIDIA GPU or a TPU, each with small arrays of the engine's own
sizes and its reference."""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ....kvcache.kernels import attention, gpu_rope, hopper_attention, recurrent_step, tpu_attention
from ....kvcache.kernels.hopper_attention import HOPPER_PREFILL
from ....kvcache.kernels.tiles import LayerPages
from ....kvcache.pages import (
    NO_LANES,
    Batch,
    attend_key_blocks,
    attend_packed_heads,
    pool_row_shape,
    read_kv_block,
    write_kv_to_slots,
)
from ....kvcache.quantised import choose_cache_format, empty_pool, quantise_heads
from ....model.attention import AttentionParams, NewHeads
from ....model.config import GroupedQuery, Latent, ModelConfig
from ....model.experts import MoE
from ....model.gpus import (
    HOPPER_CAPABILITY,
    Kernel,
    disable_kernels,
    is_tpu_target,
    refusal_reason,
    target_gpu,
)
from ....model.kinds import has_fusible_rope
from ....model.layers import Weight, einsum
from ....model.recurrent.kinds import DeltaNet, Mamba
from ....model.recurrent.linear import Terms, step_recurrence
from ....model.rope import alibi_slopes, rotary_factors
from ....model.transformer import Decoder
from ....model.tree import paths_and_leaves
from ....model.weights import expert_tiles, fixed_tiles, grouped_matmul, nibbles
from ....model.weights.compression.compress import CONTRACTED_AXES
from ....model.weights.device_forms import Lanes, device_lanes
from ....model.weights.input_quantised import InputQuantised
from ....model.weights.lora import drop_lora
from ....model.weights.quant import Quantised, einsum_by_kernel, ragged_dot_by_kernel
from ...runtime.compiled.shapes import Sizes
from .code_cases import code_cases
from .kernel_case import KernelCase, must_interpret, random_normal

CACHED_TOKENS, CHUNK_TOKENS = (150, 7), 96  # tokens of two rows in the cache; tokens of a row in a prefill
LONG_CHUNK_TOKENS = 160  # tokens of a row in a prefill whose heads Hopper's kernel takes one by one
# Tokens of the first row in the cache if kernels are compiled: several blocks and parts.
MANY_CACHED_TOKENS = 5000
MAX_EXPERTS = 4  # maximum experts in the check of a product


def kernel_cases(config: ModelConfig, params: Decoder, sizes: Sizes) -> Iterator[KernelCase]:
    """Yield the kernels that an engine would use: on an NVIDIA GPU all kinds, on a TPU attention alone."""
    dtype = params.embed.dtype
    mixers = dict.fromkeys(mixer for kind in config.layers for mixer in kind.mixers)
    if target_gpu() is not None or is_tpu_target():
        lanes = device_lanes(params.embed.sharding.device_set, sizes.shards) if is_tpu_target() else NO_LANES
        for mixer in mixers:
            if isinstance(mixer, GroupedQuery | Latent):
                yield from attention_cases(mixer, sizes, dtype, lanes)
    if target_gpu() is None:
        return
    for mixer in mixers:
        if isinstance(mixer, GroupedQuery) and has_fusible_rope(mixer):
            yield from rope_cases(mixer, sizes, dtype)
        elif isinstance(mixer, DeltaNet | Mamba):
            yield from state_cases(mixer)
    yield from expert_cases(params, dtype)
    yield from weight_cases(params, dtype)
    yield from code_cases(config, params, dtype)


def attention_cases(
    mixer: GroupedQuery | Latent, sizes: Sizes, dtype: Any, lanes: Lanes
) -> Iterator[KernelCase]:
    if isinstance(mixer, Latent):
        N, K, H = mixer.num_heads, 1, mixer.rank + mixer.rope_size
        first = partial(expand_rank, mixer.rank)
        attention_params = AttentionParams(H**-0.5, expand=first, rank=mixer.rank)
    else:
        N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_size
        sinks = jnp.asarray(np.linspace(-1, 1, N), dtype) if mixer.sinks else None
        attention_params = AttentionParams(
            H**-0.5, mixer.window, mixer.softcap, sinks, chunked=mixer.chunked, num_kv_heads=K,
            alibi=None if mixer.alibi is None else alibi_slopes(N, mixer.alibi),
        )  # fmt: skip
    kv_cache_dtype = sizes.kv_cache_dtype
    row = pool_row_shape(K, H, choose_cache_format(kv_cache_dtype, dtype), lanes)
    description = f"{N}/{K} heads of {H}, {dtype}, pages of {sizes.page_size}"
    description += "" if kv_cache_dtype == "auto" else f", {kv_cache_dtype}"
    known = {"window": attention_params.window, "softcap": attention_params.softcap}
    description += "".join(f", {name} {value:g}" for name, value in known.items() if value is not None)
    description += ", sinks" * (attention_params.sinks is not None) + ", chunked" * attention_params.chunked
    for T in (1, CHUNK_TOKENS, LONG_CHUNK_TOKENS):
        inputs = partial(
            attention_inputs, (T, N, H), row, sizes.page_size, kv_cache_dtype, dtype, attention_params
        )
        q, pages = jax.eval_shape(inputs)
        for kernel, reason in attention_kernels(q, pages, attention_params):
            if T == LONG_CHUNK_TOKENS and kernel != HOPPER_PREFILL:
                continue
            run = partial(attend_by_kernel, attention_params=attention_params, kernel=kernel)
            tokens = f", {T} tokens" * (T == LONG_CHUNK_TOKENS)
            reference = partial(attend_by_reference, attention_params=attention_params)
            yield KernelCase(kernel, description + tokens, reason, inputs, run, reference)


def attention_kernels(
    q: Any, pages: LayerPages, attention_params: AttentionParams
) -> Iterator[tuple[Kernel, str | None]]:
    """Yield the kernels that can read these pages, the first choice first.

    Each comes with the reason why programs do not use it, or None.
    """
    if is_tpu_target():
        if tpu_attention.fits_tpu_kernel(q, pages, attention_params):
            kernel = tpu_attention.choose_tpu_kernel(q.shape[1])
            yield kernel, refusal_reason(kernel)
        return
    current_gpu = target_gpu()
    if (
        current_gpu
        and current_gpu.capability == HOPPER_CAPABILITY
        and hopper_attention.fits_hopper_kernel(q, *pages[:2], attention_params)
    ):
        yield HOPPER_PREFILL, refusal_reason(HOPPER_PREFILL)
    if attention.fits_triton_kernel(q, *pages[:2], attention_params):
        yield (
            attention.choose_triton_kernel(q.shape[1], attention_params),
            attention.kernel_refusal(q, *pages[:2], attention_params),
        )


def expand_rank(rank: int, rows: Array, _: Array) -> tuple[Array, Array]:
    """Return latent rows as keys, and their first `rank` numbers as values."""
    return rows, rows[..., :rank]


def attention_inputs(
    query_shape: tuple[int, int, int],
    row: tuple[int, int],
    W: int,
    kv_cache_dtype: str,
    dtype: Any,
    attention_params: AttentionParams,
) -> tuple[Array, LayerPages]:
    """Return queries [B,T,N,H] of two rows, the second shorter, and random pages in a random order.

    query_shape: T, N, H of the queries.
    row: heads of a token in the pool, and numbers of each.

    Positions after the last token hold NaN.
    """
    T, N, H = query_shape
    K, size = row
    before = CACHED_TOKENS if must_interpret() else (MANY_CACHED_TOKENS, CACHED_TOKENS[1])
    B, M = len(before), -(-(max(before) + T) // W)
    q, P, tokens = random_normal(0, (B, T, N, H), dtype), B * M, (T, max(1, T - 9))
    table = np.random.default_rng(0).permutation(P).reshape(B, M)
    written = np.zeros((P, W), bool)
    written[table] = (np.arange(M * W) < np.add(before, tokens)[:, None]).reshape(B, M, W)
    values = (random_normal(seed, (K, P, W, size), dtype) for seed in (1, 2))
    empty = empty_pool((1, 1, 1, size), choose_cache_format(kv_cache_dtype, dtype))
    k, v = (quantise_heads(empty, jnp.where(written[None, ..., None], x, jnp.nan)) for x in values)
    pages, start, count = (jnp.asarray(x, jnp.int32) for x in (table, before, tokens))
    return q, LayerPages(k, v if attention_params.rank is None else None, pages, start, count)


def attend_by_kernel(q: Array, pages: LayerPages, attention_params: AttentionParams, kernel: Kernel) -> Array:
    """Return the outputs of attention by the kernel."""

    def attend(q: Array) -> Array:
        if is_tpu_target():
            return tpu_attention.attend_tpu(q, pages, attention_params, must_interpret())
        with disable_kernels({HOPPER_PREFILL.name} - {kernel.name}):
            return attention.attend_gpu(q, pages, attention_params, must_interpret())

    return mask_padding(attend_packed_heads(attend, q, pages.k, attention_params.num_kv_heads), pages)


def mask_padding(out: Array, pages: LayerPages) -> Array:
    """Return the outputs [B,T,N,U] with zeros in place of padding."""
    is_real = jnp.arange(out.shape[1])[None] < pages.count[:, None]
    return jnp.where(is_real[..., None, None], out, 0)


def attend_by_reference(q: Array, pages: LayerPages, attention_params: AttentionParams) -> Array:
    """Return the outputs of attention by the reference."""
    start, count, table = pages.start, pages.count, pages.table
    batch = Batch(jnp.zeros(q.shape[:2], jnp.int32), start, count, (table,), start)
    read = partial(read_kv_block, pages[:2], table, attention_params, q.dtype)
    attend = partial(attend_key_blocks, batch=batch, read=read, attention=attention_params)
    return jax.jit(
        lambda q: mask_padding(
            attend_packed_heads(attend, q, pages.k, attention_params.num_kv_heads).astype(q.dtype), pages
        )
    )(q)


def rope_cases(grouped_query: GroupedQuery, sizes: Sizes, dtype: Any) -> Iterator[KernelCase]:
    """Yield the case of RoPE and cache write in one kernel: three tokens, one of which is not written."""
    N, K, H, W = grouped_query.num_heads, grouped_query.num_kv_heads, grouped_query.head_size, sizes.page_size
    rope, norm = grouped_query.rope, grouped_query.qk_norm
    assert rope is not None

    def inputs() -> tuple[Any, ...]:
        position, page, offset = (
            jnp.asarray(x, jnp.int32)[:, None] for x in ((5, 0, 999), (2, 0, 9), (W - 1, 0, 1))
        )
        gains = (
            (random_normal(1, (H,), dtype), random_normal(2, (H,), dtype))
            if norm and norm.gain
            else (None, None)
        )
        q, k, v = (random_normal(seed, (3, 1, n, H), dtype) for seed, n in ((0, N), (5, K), (6, K)))
        new = NewHeads(q, k, v, rotary_factors(position, rope, grouped_query.rotary_dims), gains, norm)
        return new, tuple(random_normal(seed, (K, 4, W, H), dtype) for seed in (3, 4)), (page, offset)

    pool = jax.eval_shape(lambda: empty_pool((K, 4, W, H), choose_cache_format(sizes.kv_cache_dtype, dtype)))
    if gpu_rope.fits_gpu_rope(jax.ShapeDtypeStruct((3, 1, N, H), dtype), (pool, pool), norm):
        description = f"{N}/{K} heads of {H}, {grouped_query.rotary_dims} turned, {dtype}" + ", normed" * (
            norm is not None
        )
        yield KernelCase(
            gpu_rope.ROPE_KERNEL,
            description,
            refusal_reason(gpu_rope.ROPE_KERNEL),
            inputs,
            rope_by_kernel,
            rope_by_reference,
        )


def rope_by_kernel(new: NewHeads, pools: tuple[Array, Array], page_and_offset: tuple[Array, Array]) -> Array:
    """Return rotated queries and written pools as one flat array, by the kernel."""
    q, pools = gpu_rope.gpu_rope_and_write(new, pools, page_and_offset, must_interpret())
    return jnp.concatenate([x.reshape(-1) for x in (q, *pools)])


def rope_by_reference(
    new: NewHeads, pools: tuple[Array, Array], page_and_offset: tuple[Array, Array]
) -> Array:
    """Return rotated queries and written pools as one flat array, by the reference."""
    q, k = new.rotated_qk
    written_pools: Any = write_kv_to_slots(pools, page_and_offset, k, new.v)
    return jnp.concatenate([x.reshape(-1) for x in (q, *written_pools)])


def state_cases(mixer: DeltaNet | Mamba) -> Iterator[KernelCase]:
    """Yield the case of a step of recurrent states: two rows, one of which begins without a state."""
    assert mixer.state_shapes.memory is not None
    (N, H, U), B = mixer.state_shapes.memory, 2
    is_delta, by_dimension = isinstance(mixer, DeltaNet), getattr(mixer, "decay_rank", None) is not None

    def inputs() -> tuple[Any, ...]:
        decay = jax.nn.sigmoid(random_normal(1, (B, N, H) if by_dimension else (B, N)))
        q, k, v = (random_normal(i, (B, N, size)) / size**0.5 for i, size in ((2, H), (3, H), (4, U)))
        x = Terms(q, k, v, decay, jax.nn.sigmoid(random_normal(5, (B, N))) if is_delta else None)
        source, target = (jnp.asarray(pages, jnp.int32) for pages in ([1, -1], [2, 0]))
        return random_normal(0, (N, 2 * B, H, U)), recurrent_step.StatePages(source, target), x

    if {H, U} <= set(recurrent_step.MEMORY_SIZES):
        description, reason = f"{N} heads of {H}x{U}", refusal_reason(recurrent_step.STEP_KERNEL)
        yield KernelCase(
            recurrent_step.STEP_KERNEL,
            description,
            reason,
            inputs,
            step_state_by_kernel,
            step_state_by_reference,
        )


def step_state_by_kernel(pool: Array, state_pages: recurrent_step.StatePages, x: Terms) -> Array:
    """Return new states and outputs as one flat array, by the kernel."""
    new, out = recurrent_step.step_pages(pool, state_pages, x, must_interpret())
    return jnp.concatenate([new[:, state_pages.target].reshape(-1), out.reshape(-1)])


def step_state_by_reference(pool: Array, state_pages: recurrent_step.StatePages, x: Terms) -> Array:
    """Return new states and outputs as one flat array, by the reference."""
    before = pool[:, jnp.maximum(state_pages.source, 0)]
    new, out = step_recurrence(jnp.where((state_pages.source >= 0)[None, :, None, None], before, 0.0), x)
    return jnp.concatenate([new.reshape(-1), out.reshape(-1)])


def expert_cases(params: Decoder, dtype: Any) -> Iterator[KernelCase]:
    """Yield the products of the experts that a device has, or of its parts of them; each size once."""
    cases: dict[str, KernelCase] = {}
    layers = jax.tree.leaves(drop_lora(params), is_leaf=lambda x: isinstance(x, MoE))
    experts = [layer.experts for layer in layers if isinstance(layer, MoE)]
    for w in (w for f in experts for w in f.matrices) if dtype.itemsize == 2 else ():
        weight = jax.tree.map(shape_per_device, w)
        shapes = weight.ragged_dot_shapes if isinstance(weight, Weight) else (weight.shape,)
        new_cases = [case for shape in shapes for case in expert_matrix_cases(shape, dtype)]
        if isinstance(weight, InputQuantised):
            case = quantised_expert_case(weight.weight, dtype, has_row_codes=True)
            new_cases = [] if case is None else [case]
        elif isinstance(weight, Quantised) and (case := quantised_expert_case(weight, dtype)) is not None:
            # jax's kernel is used if ours is refused; ours gets codes, never matrices
            new_cases = [case, *(new_case for new_case in new_cases if new_case.kernel != case.kernel)]
        cases |= {case.name: case for case in new_cases if case.name not in cases}
    yield from cases.values()


def shape_per_device(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a device's shard of an array, or of a ShapeDtypeStruct."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype)


def rows_by_expert(E: int) -> list[int]:
    """Return the rows of each of the first experts of E; one has none."""
    return [3, 0, 5, 2][: min(E, MAX_EXPERTS)]


def expert_matrix_cases(shape: tuple[int, ...], dtype: Any) -> Iterator[KernelCase]:
    """Yield the product of matrices [E,D,F] by our kernel, and by jax's if it could replace ours."""
    counts, description = rows_by_expert(shape[0]), f"{shape[1]}x{shape[2]}, {dtype}"
    few = len(counts), *shape[1:]

    def inputs() -> tuple[Any, ...]:
        x = random_normal(0, (sum(counts), shape[1]), dtype)
        return x, random_normal(1, few, dtype), jnp.asarray(counts, jnp.int32)

    def multiply_tiles(x: Array, w: Array, sizes: Array) -> Array:
        return expert_tiles.multiply_experts(
            x, expert_tiles.ExpertMatrices(w), sizes, interpret=must_interpret()
        )

    kernel, reason = expert_tiles.EXPERT_TILES_KERNEL, None
    if not expert_tiles.can_tile_experts(dtype, few):
        reason = refusal_reason(kernel) or "it needs multiples of 64"
    yield KernelCase(kernel, description, reason, inputs, multiply_tiles, jax.lax.ragged_dot)
    if grouped_matmul.can_multiply_grouped(dtype, few):
        yield KernelCase(
            grouped_matmul.GROUPED_KERNEL,
            description,
            None,
            inputs,
            grouped_matmul.grouped_product,
            jax.lax.ragged_dot,
        )


def quantised_expert_case(w: Quantised, dtype: Any, has_row_codes: bool = False) -> KernelCase | None:
    """Return the product of quantised experts, with rows of codes or of numbers; None if our kernel does not
    take it."""
    shape, counts = w.shape, rows_by_expert(w.shape[0])
    if not w.has_tile_kernel(dtype):
        return None

    def inputs() -> tuple[Any, ...]:
        E, values, scales, zeros = len(counts), w.values, w.scales, w.zeros
        bits = jax.random.bits(jax.random.key(1), (E, *values.shape[1:]), jnp.uint8)
        random_codes = (
            bits if values.dtype == bits.dtype else (random_normal(1, bits.shape) * 32).astype(values.dtype)
        )
        ones = jnp.ones((E, *scales.shape[1:]), scales.dtype)
        eights = None if zeros is None else jnp.full(ones.shape, nibbles.ZERO_CODE, zeros.dtype)
        quantised = Quantised(random_codes, ones, eights, w.scheme, w.packed)
        x = random_normal(0, (sum(counts), shape[1]), dtype)
        return jnp.round(x * 32) if has_row_codes else x, quantised, jnp.asarray(counts, jnp.int32)

    def run(x: Array, quantised: Quantised, sizes: Array) -> Array:
        row_scales = jnp.ones((len(x), 1), jnp.float32) if has_row_codes else None
        return ragged_dot_by_kernel(x, quantised, sizes, None, must_interpret(), row_scales)

    def reference(x: Array, quantised: Quantised, sizes: Array) -> Array:
        return jax.lax.ragged_dot(x, quantised.dequantise(dtype), sizes)

    scales = f"{'x'.join(map(str, w.scales.shape[1:]))} scales in {w.scales.dtype}"
    others = ", zeros" * (w.zeros is not None) + ", rows in codes" * has_row_codes
    description = f"{shape[1]}x{shape[2]}, {dtype}, {w.scheme}, {scales}{others}"
    return KernelCase(expert_tiles.EXPERT_TILES_KERNEL, description, None, inputs, run, reference)


def weight_cases(params: Decoder, dtype: Any) -> Iterator[KernelCase]:
    """Yield the products of weights that are records in the parameter tree; each tiling once."""
    cases: dict[str, KernelCase] = {}
    kinds = Quantised, fixed_tiles.FixedTiled
    for path, w in paths_and_leaves(drop_lora(params), kinds):
        name = path.rpartition(".")[2]
        if isinstance(w, kinds) and name in CONTRACTED_AXES:
            shape = w.array.shape if isinstance(w, fixed_tiles.FixedTiled) else w.shape
            inputs = len(CONTRACTED_AXES[name]) if len(shape) + CONTRACTED_AXES[name][0] == 0 else 0
            case = (
                fixed_tiles_case(w, inputs)
                if isinstance(w, fixed_tiles.FixedTiled)
                else int4_case(w, inputs, dtype)
            )
            if case is not None:
                cases.setdefault(case.name, case)
    yield from cases.values()


def int4_case(w: Quantised, inputs: int, dtype: Any) -> KernelCase | None:
    """Return the product of three rows with an int4 weight of these sizes; None if no kernel takes it."""
    shape, kernel = w.shape, nibbles.NIBBLE_KERNEL

    def make_inputs() -> tuple[Any, ...]:
        codes = jax.random.bits(jax.random.key(1), w.values.shape, jnp.uint8)
        scales = jnp.ones(w.scales.shape, w.scales.dtype)
        zeros = None if w.zeros is None else jnp.full(w.zeros.shape, nibbles.ZERO_CODE, w.zeros.dtype)
        quantised = Quantised(codes.astype(w.values.dtype), scales, zeros, w.scheme, w.packed)
        return random_normal(0, (3, *shape[:inputs]), dtype), quantised

    @jax.jit
    def reference(x: Array, quantised: Quantised) -> Array:
        inner = prod(shape[:inputs])
        product = einsum("rd,df->rf", x.reshape(3, inner), quantised.dequantise(dtype).reshape(inner, -1))
        return product.reshape(3, *shape[inputs:])

    def has_kernel(x: Array, quantised: Quantised) -> bool:
        return quantised.has_nibble_kernel(x, inputs)

    answers: list[bool] = []
    if w.nibble_format is nibbles.INT4_NIBBLES:
        jax.eval_shape(lambda: answers.append(has_kernel(*make_inputs())))
    run = jax.jit(partial(einsum_by_kernel, inputs=inputs, dtype=dtype))
    scales = f"scales {'x'.join(map(str, w.scales.shape))} in {w.scales.dtype}"
    description = f"{'x'.join(map(str, shape))}, {dtype}, {scales}{', zeros' if w.zeros is not None else ''}"
    return (
        KernelCase(kernel, description, refusal_reason(kernel), make_inputs, run, reference)
        if any(answers)
        else None
    )


def fixed_tiles_case(w: fixed_tiles.FixedTiled, inputs: int) -> KernelCase | None:
    """Return a small product in the tiles of a weight; None if it has none.

    inputs: axes that are summed, the first ones; 0 sums the last axis, as for logits.
    """
    shape, dtype, kernel = w.array.shape, w.array.dtype, fixed_tiles.FIXED_KERNEL
    tiles = (
        fixed_tiles.choose_fixed_tiles(prod(shape[:inputs]), prod(shape[inputs:]))
        if inputs
        else fixed_tiles.LOGITS_TILES
    )
    if tiles is None:
        return None
    inner, columns = 8 * tiles.depth, 4 * fixed_tiles.WARPGROUPS * fixed_tiles.FIXED_TILE_ROWS
    wide = (inner, columns) if inputs else (columns, inner)

    def make_inputs() -> tuple[Any, ...]:
        return random_normal(0, (3, inner), dtype), random_normal(1, wide, dtype)

    run: Any = (
        partial(fixed_tiles.multiply_fixed_rows, inputs=1, tiles=tiles)
        if inputs
        else fixed_tiles.multiply_fixed_head
    )
    reference = (
        partial(einsum, "rd,df->rf")
        if inputs
        else partial(einsum, fixed_tiles.LOGITS_EQUATION, dtype=jnp.float32)
    )
    reason = refusal_reason(kernel)
    if reason is None and fixed_tiles.import_jax_kernel(fixed_tiles.HOPPER_MODULE) is None:
        reason = "jax's module, or absl, is missing"
    return KernelCase(kernel, f"{tiles.label}, {dtype}", reason, make_inputs, run, reference)
