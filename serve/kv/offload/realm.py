"""Realms: hashes of everything, except tokens, that the bits of pages and answers depend on. They are
compared before pages of another process are used, and before another process continues an answer."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from ....kvcache.stages import tree_devices
from ....model.attention import FusedQKV
from ...host.devices import memory_limit
from ...host.identity import gather_facts, hash_facts
from ...options.engine import EngineOptions
from ...runtime.compiled.program_table import WARMUP_THREAD_PREFIX
from ...runtime.compiled.shapes import CanonicalShapes
from ...runtime.executor import StepPrograms

HASH_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd constants of Knuth's and of xxHash


def hash_page_realm(
    programs: StepPrograms, params: Any, options: EngineOptions, is_exact: bool = True
) -> bytes:
    """Return a hash of 32 bytes, equal for engines whose pages of the same hash have the same bits.

    These engines have the same code, machine, model, weights, layout and canonical shapes. Without `is_exact`
    the hash depends on code, model, weights and dtypes only.
    """
    pools = [
        (x.shape[0], *x.shape[2:], str(x.dtype)) for x in jax.tree.leaves(programs.abstract_arguments.cache)
    ]
    return hash_realm(programs, params, options, is_exact, repr(programs.config), pools)


def hash_answer_realm(programs: StepPrograms, target: Any, options: EngineOptions, *others: Any) -> bytes:
    """Return a hash of 32 bytes, equal for engines that continue the same tokens in the same way.

    It covers the target's parameters (draft tokens change no answer) and `others` that answers depend on.
    """
    config, sizes = repr(programs.config.target), programs.sizes
    lora = options.enable_lora, options.max_loras, options.max_lora_rank, options.lora_experts
    cache, reported = (options.kv_cache_dtype, options.page_size), options.logprobs_mode
    facts = config, sizes.max_model_len, sizes.processors, *cache, lora, reported
    return hash_realm(programs, target, options, options.reproducible, *facts, *others)


def hash_realm(
    programs: StepPrograms, params: Any, options: EngineOptions, is_exact: bool, *facts: Any
) -> bytes:
    """Hash facts and parameters; with `is_exact` also the parameters' layout and the products'
    configuration."""
    device = min(tree_devices(params), key=lambda d: d.id)
    facts += gather_facts("exact realm" if is_exact else "inexact realm", device), options.activations
    if is_exact:
        layouts = [(x.shape, str(x.dtype), describe_split(x.sharding)) for x in jax.tree.leaves(params)]
        products = choose_canonical_products(programs, options, device)
        facts += jax.tree.structure(params), layouts, products, options.reproducible
    with ThreadPoolExecutor(
        1, WARMUP_THREAD_PREFIX
    ) as pool:  # its compilations count as those of the warm-up
        weights = pool.submit(hash_params, params).result()
    return bytes.fromhex(hash_facts(*facts, weights))


def choose_canonical_products(
    programs: StepPrograms, options: EngineOptions, device: Any
) -> tuple[CanonicalShapes, str | None]:
    """Return the canonical shapes, and the hash of their products' configuration; None on a CPU. If no
    canonical shape was compiled, it is the hash of all steps."""
    options = options.with_device_load(memory_limit(device))
    canonical = CanonicalShapes.choose(device.platform, options, programs.sizes)
    compiled = [shape for shape in canonical if shape in programs.steps]
    return canonical, programs.matmul_tuning_hash(compiled or programs.steps)


def describe_split(sharding: jax.sharding.Sharding) -> str:
    """Describe how an array is split, without the devices' numbers."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} of {dict(sharding.mesh.shape)}"
    return f"{len(sharding.device_set)} devices"


def hash_params(params: Any) -> str:
    """Hash every number of the parameters on their devices, from which only sums are read.

    If several processes hold an array, the parts of this process are hashed. A `FusedQKV` is hashed as its
    projections.
    """
    hasher = hashlib.sha256()

    def hash_leaf(leaf: Any) -> None:
        """Add an array to the hash."""
        parts = [leaf] if leaf.is_fully_addressable else [part.data for part in leaf.addressable_shards]
        for part in parts:
            hasher.update(jax.device_get(array_digest(part)).tobytes())

    # one by one: sums over a CPU's devices that overlap can hang
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, FusedQKV)):
        for array in leaf.projections if isinstance(leaf, FusedQKV) else [leaf]:
            hash_leaf(array)
    return hasher.hexdigest()


@jax.jit
def array_digest(x: Shaped[Array, "..."]) -> UInt32[Array, "lanes"]:
    """Sum the bits of all numbers, each mixed with its position, in several lanes. Sums of integers do not
    depend on their order."""
    bits = to_uint32_bits(x)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    lanes = [jnp.uint32(lane) for lane in HASH_MULTIPLIERS]
    return jnp.stack(
        [jnp.sum(mix_bits(bits ^ mix_bits(index * lane + lane)), dtype=jnp.uint32) for lane in lanes]
    )


def to_uint32_bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return the bits of each number as uint32. Raises TypeError for floats of other than 8, 16 or 32
    bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    width = jnp.dtype(x.dtype).itemsize * 8
    if width not in (8, 16, 32):
        raise TypeError(f"parameters of {x.dtype} cannot be named: floats of 8, 16 or 32 bits, or integers")
    return jax.lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint32)


def mix_bits(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Apply the 32-bit finalizer of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
