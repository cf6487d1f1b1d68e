"""Realms: fingerprints of everything but tokens that the bits of pages and answers depend on. They are
compared where pages outlive their process and where answers are resumed in another process."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32

from ....kvcache.stages import devices
from ....model.attention import FusedQKV
from ...host.devices import memory_limit
from ...options.engine import EngineOptions
from ...runtime.compiled import executable_cache
from ...runtime.compiled.compile import THREADS
from ...runtime.compiled.shapes import Canonical
from ...runtime.programs import StepPrograms

LANES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd constants of Knuth's and of xxHash


def realm(programs: StepPrograms, params: Any, options: EngineOptions, exact: bool = True) -> bytes:
    """Return 32 bytes that are equal for engines whose pages of the same name have the same bits: of the same
    code and machine, the same model with the same weights, the same layout and the same canonical shapes.
    Without `exact` they are equal for the same code, model, weights and kinds of numbers."""
    pools = [(x.shape[0], *x.shape[2:], str(x.dtype)) for x in jax.tree.leaves(programs.like.cache)]
    return named(programs, params, options, exact, repr(programs.config), pools)


def realm_of_answers(programs: StepPrograms, target: Any, options: EngineOptions, *others: Any) -> bytes:
    """Return 32 bytes that are equal for engines that continue equal tokens equally: the realm of the
    target's parameters, since draft tokens change no answer, and of `others` that answers depend on."""
    lora = options.enable_lora, options.max_loras, options.max_lora_rank, options.lora_experts
    facts = repr(programs.config.target), options.kv_cache_dtype, options.page_size, lora, *others
    return named(programs, target, options, options.reproducible, *facts)


def named(programs: StepPrograms, params: Any, options: EngineOptions, exact: bool, *facts: Any) -> bytes:
    """Hash facts, the parameters and, with `exact`, how they are laid out and multiplied."""
    device = min(devices(params), key=lambda d: d.id)
    if exact:
        canonical = Canonical.on(device.platform, options.on(memory_limit(device)), programs.sizes)
        placed = [(x.shape, str(x.dtype), layout(x.sharding)) for x in jax.tree.leaves(params)]
        products = programs.products([s for s in canonical if s in programs.steps] or programs.steps)
        facts += (
            jax.tree.structure(params),
            placed,
            canonical,
            products,
            options.reproducible,
            executable_cache.environment(device),
        )
    with ThreadPoolExecutor(1, THREADS) as pool:  # what it compiles is compiled beside serving
        weights = pool.submit(device_hash, params).result()
    return hashlib.sha256(repr((executable_cache.source(), *facts, weights)).encode()).digest()


def layout(sharding: jax.sharding.Sharding) -> str:
    """Describe how an array is split, independently of the devices' numbers."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} of {dict(sharding.mesh.shape)}"
    return f"{len(sharding.device_set)} devices"


def device_hash(params: Any) -> str:
    """Hash every number of the parameters on their devices, from which only sums are read. Of an array that
    several processes hold, this process's parts are hashed; of a `FusedQKV` its projections."""
    found = hashlib.sha256()

    def add(leaf: Any) -> None:
        parts = [leaf] if leaf.is_fully_addressable else [part.data for part in leaf.addressable_shards]
        for part in parts:
            found.update(jax.device_get(digest(part)).tobytes())

    # one by one: sums over a CPU's devices that overlap can hang
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, FusedQKV)):
        for one in leaf.parts if isinstance(leaf, FusedQKV) else [leaf]:
            add(one)
    return found.hexdigest()


@jax.jit
def digest(x: Shaped[Array, "..."]) -> UInt32[Array, "lanes"]:
    """Sum all numbers' bits, each mixed with its position, in several lanes. The sums are of integers, so
    their order does not matter."""
    bits = as_bits(x)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    lanes = [jnp.uint32(lane) for lane in LANES]
    return jnp.stack([jnp.sum(mixed(bits ^ mixed(place * lane + lane)), dtype=jnp.uint32) for lane in lanes])


def as_bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return each number's bits; integers of fewer than 8 bits are widened."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    width = jnp.dtype(x.dtype).itemsize * 8
    if width not in (8, 16, 32):
        raise TypeError(f"parameters of {x.dtype} cannot be named: floats of 8, 16 or 32 bits, or integers")
    return jax.lax.bitcast_convert_type(x, f"uint{width}").astype(jnp.uint32)


def mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Apply the 32-bit finalizer of MurmurHash3 (Appleby)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
