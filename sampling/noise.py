"""Random numbers that depend on (seed, position) alone. They equal those of `jax.random`, for many rows at
once.

Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as one expression.
`jax.random` makes a loop of its rounds on a CPU, which takes longer to compile and to run.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, UInt, UInt32

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA
HashWords = tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]
ThreefryKey = tuple[UInt32[Array, "*#shape"], UInt32[Array, "*#shape"]]


def threefry_hash(key: ThreefryKey, count: HashWords) -> HashWords:
    """Return the Threefry-2x32 hash of two words under a key."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    a, b = count[0] + keys[0], count[1] + keys[1]
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            a = a + b
            b = a ^ ((b << jnp.uint32(r)) | (b >> jnp.uint32(32 - r)))
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b


def fold_in(key: ThreefryKey, data: UInt32[Array, " B"]) -> HashWords:
    """Return `jax.random.fold_in` of one key per row."""
    return threefry_hash(key, (jnp.zeros_like(data), data))


def uniform(
    seed: UInt[Array, " B"], position: Int[Array, " B"], n: int, *purpose: int, least: float = 0.0
) -> Float32[Array, "B {n}"]:
    """Return n numbers per row in [least, 1). They equal `jax.random.uniform` with `jax.random.key(seed)`,
    into which the position, then `purpose`, are folded."""
    seed = seed.astype(jnp.uint32)
    key = fold_in((jnp.zeros_like(seed), seed), position.astype(jnp.uint32))
    for number in purpose:
        key = fold_in(key, jnp.full_like(seed, number))
    number = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint32), (len(seed), n))
    a, b = threefry_hash((key[0][:, None], key[1][:, None]), (jnp.zeros_like(number), number))
    mantissa = ((a ^ b) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1.0
    return jnp.maximum(jnp.float32(least), unit * (jnp.float32(1) - jnp.float32(least)) + jnp.float32(least))


def gumbel(
    seed: UInt[Array, " B"], position: Int[Array, " B"], n: int, *purpose: int
) -> Float32[Array, "B {n}"]:
    """Return n Gumbel numbers per row. They equal `jax.random.gumbel` with the key that `uniform`
    describes."""
    tiny = float(jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform(seed, position, n, *purpose, least=tiny)))
