"""Recurrent mixers: blocks of tokens do what single tokens do one after the other, whatever decays and keys
they have."""

import jax
import numpy as np
import pytest
from cases.programs import StoredJit
from suite.marks import full_if

from duetto.model.attention import causal
from duetto.model.recurrent.kinds import STATE_BLOCK_TOKENS, DeltaNet, Mamba, StateShapes
from duetto.model.recurrent.linear import (
    Terms,
    exponentiate_decay,
    invert_unit_triangular,
    scan_blocks,
    step_recurrence,
)
from duetto.model.recurrent.states import (
    Convolution,
    Recurrence,
    RecurrentInputs,
    RecurrentState,
    empty_recurrent_state,
)

B, N, H, U = 3, 2, 5, 4
LONG = 2 * STATE_BLOCK_TOKENS + 7
KINDS = [(by_dimension, rate) for by_dimension in (False, True) for rate in (False, True)]


def drawn(T: int, by_dimension: bool, rate: bool, seed: int = 0) -> Terms:
    """Random terms [B,T,...], with keys of length one and decays from almost none to strong ones."""
    random = np.random.RandomState(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    k = normal(B, T, N, H)
    decay = -np.exp(3 * normal(B, T, N, *(H,) * by_dimension) - 2)
    return Terms(
        normal(B, T, N, H),
        k / np.linalg.norm(k, axis=-1, keepdims=True),
        normal(B, T, N, U),
        decay,
        random.uniform(0, 1, (B, T, N)).astype(np.float32) if rate else None,
        normal(B, T, N, U),
    )


def one_by_one(memory: np.ndarray, x: Terms, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence as it is written, of one row's first tokens in float64: its memory [N,H,U] and
    outputs."""
    memory, out = memory.astype(np.float64), []
    q, k, v, decay, skip = (np.asarray(a, np.float64) for a in (x.q, x.k, x.v, x.decay, x.skip))
    for t in range(count):
        remains = np.exp(decay[t] if x.has_decay_per_dimension else decay[t][:, None])
        memory = memory * remains[..., None]
        change = v[t]
        if x.rate is not None:
            change = np.asarray(x.rate[t], np.float64)[:, None] * (
                v[t] - np.einsum("nhu,nh->nu", memory, k[t])
            )
        memory = memory + k[t][..., None] * change[:, None]
        out.append(np.einsum("nhu,nh->nu", memory, q[t]) + skip[t])
    return memory, np.array(out).reshape(count, N, U)


@StoredJit
def scanned(memory: jax.Array, x: Terms, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The memory after each row's tokens, and the outputs."""
    return scan_blocks(memory, x, count, lambda _, j, new: new, memory)


def assert_scan_is_one_by_one(x: Terms, counts: list[int], atol: float = 2e-5) -> None:
    T = x.k.shape[1]
    memory = np.random.RandomState(1).standard_normal((N, B, H, U)).astype(np.float32)
    left, out = scanned(memory, x, np.array(counts, np.int32))
    assert out.shape == (B, T, N, U)
    for b, count in enumerate(counts):
        own = jax.tree.map(lambda leaf, b=b: leaf[b], x)
        expected, outputs = one_by_one(memory[:, b], own, count)
        np.testing.assert_allclose(np.asarray(left)[:, b], expected, atol=atol)
        np.testing.assert_allclose(np.asarray(out)[b, :count], outputs, atol=atol)


@full_if(lambda T: T == STATE_BLOCK_TOKENS)
@pytest.mark.parametrize(("by_dimension", "rate"), KINDS)
@pytest.mark.parametrize("T", [3, STATE_BLOCK_TOKENS, LONG])
def test_blocks_equal_single_tokens(by_dimension, rate, T):
    assert_scan_is_one_by_one(drawn(T, by_dimension, rate), [T] * B)


@pytest.mark.parametrize(("by_dimension", "rate"), KINDS)
def test_tokens_behind_a_row_change_nothing(by_dimension, rate):
    T = LONG
    assert_scan_is_one_by_one(drawn(T, by_dimension, rate, seed=2), [T, STATE_BLOCK_TOKENS - 1, 0])


@pytest.mark.parametrize(("by_dimension", "rate"), KINDS)
def test_a_single_token_follows_the_recurrence(by_dimension, rate):
    x = drawn(1, by_dimension, rate, seed=3)
    memory = np.random.RandomState(4).standard_normal((N, B, H, U)).astype(np.float32)
    after = jax.jit(lambda memory, x: step_recurrence(memory, exponentiate_decay(x)))
    left, out = after(memory, jax.tree.map(lambda leaf: leaf[:, 0], x))
    for b in range(B):
        expected, outputs = one_by_one(memory[:, b], jax.tree.map(lambda leaf, b=b: leaf[b], x), 1)
        np.testing.assert_allclose(np.asarray(left)[:, b], expected, atol=1e-6)
        np.testing.assert_allclose(np.asarray(out)[b], outputs[0], atol=1e-6)


@pytest.mark.parametrize(("by_dimension", "rate"), KINDS)
@pytest.mark.parametrize("strong", [-300.0, -1e4, 0.0])
def test_decays_as_strong_as_floats_allow_and_none(by_dimension, rate, strong):
    """Some tokens forget all; without any decay memories without a rate only grow."""
    x = drawn(LONG, by_dimension, rate, seed=5)
    forget = np.random.RandomState(6).uniform(size=x.decay.shape) < 0.2
    decay = np.where(forget, strong, x.decay if strong else 0).astype(np.float32)
    assert_scan_is_one_by_one(Terms(x.q, x.k, x.v, decay, x.rate, x.skip), [LONG] * B, atol=2e-4)


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_a_repeated_key_keeps_states_finite(by_dimension, rate):
    """Powers of the triangle below would grow beyond all floats: halves are solved instead."""
    T = LONG
    x = drawn(T, by_dimension, True, seed=7)
    k = np.broadcast_to(x.k[:, :1], x.k.shape)
    same = Terms(x.q, k, x.v, np.zeros_like(x.decay), np.full_like(x.rate, rate), x.skip)
    assert_scan_is_one_by_one(same, [T] * B, atol=2e-4)


def test_the_inverse_of_a_triangle():
    below = np.tril(np.random.RandomState(8).standard_normal((2, 1, 3, 16, 16)), -1).astype(np.float32) * 0.3
    expected = np.linalg.inv(np.eye(16) + below.astype(np.float64))
    np.testing.assert_allclose(np.asarray(jax.jit(invert_unit_triangular)(below)), expected, atol=1e-5)


@pytest.mark.parametrize("kernel", [2, 4])
def test_convolutions_of_a_prefill_are_those_of_single_tokens(kernel):
    """And so is what they remember behind each block and behind the row."""
    T, counts = STATE_BLOCK_TOKENS + 5, [STATE_BLOCK_TOKENS + 5, STATE_BLOCK_TOKENS, 3]
    random = np.random.RandomState(9)
    weight, bias = (
        jax.device_put(random.standard_normal(s).astype(np.float32)) for s in ((N, H, kernel), (N, H))
    )
    leaves = StateShapes(((N, kernel - 1, H),))
    own = Recurrence(leaves, (Convolution(weight, bias),), jax.nn.silu)
    new = random.standard_normal((B, T, N, H)).astype(np.float32)
    start = empty_recurrent_state(leaves, B)
    write = lambda pools, j, state: pools.at[j].set(state.tails[0])
    pools, read, step = (
        np.zeros((2, *start.tails[0].shape), np.float32),
        jax.jit(own.scan, static_argnums=3),
        jax.jit(own.step),
    )
    pools, out = jax.tree.map(
        np.asarray, read(start, RecurrentInputs((new,)), np.array(counts, np.int32), write, pools)
    )
    state, tails = start, [np.asarray(start.tails[0])]
    for t in range(T):
        state, one = step(state, RecurrentInputs((new[:, t : t + 1],)))
        tails.append(np.asarray(state.tails[0]))
        np.testing.assert_allclose(np.asarray(one)[:, 0], out[:, t], atol=1e-5)
    for b, count in enumerate(counts):
        for j, end in enumerate((min(STATE_BLOCK_TOKENS, count), count)):
            np.testing.assert_array_equal(pools[j, :, b], tails[end][:, b])


def test_heads_that_are_no_multiples_are_refused():
    with pytest.raises(ValueError, match="value_heads 5 is not a multiple of key_heads 2"):
        DeltaNet(2, 5, 4, 4)
    with pytest.raises(ValueError, match="num_heads 5 is not a multiple of key_heads 2"):
        Mamba(2, 5, 4, 4)


def test_a_state_of_a_convolution_alone_has_no_memory():
    state = empty_recurrent_state(StateShapes(((N, 2, H),)), B)
    assert state.memory is None and isinstance(state, RecurrentState)


def test_a_memory_needs_no_convolution():
    """All that is told of a token stands beside: as plain gated linear attention has it."""
    T, leaves = STATE_BLOCK_TOKENS + 5, StateShapes((), (N, H, U))
    own = Recurrence(leaves, (), make_terms=lambda parts, beside: beside)
    x = drawn(T, True, False, seed=10)
    _, out = jax.jit(lambda x: causal.run_recurrence(None, 0, own, RecurrentInputs((), x)))(x)
    state, one_more = empty_recurrent_state(leaves, B), jax.jit(own.step)
    for t in range(T):
        state, one = one_more(
            state, RecurrentInputs((), jax.tree.map(lambda leaf, t=t: leaf[:, t : t + 1], x))
        )
        np.testing.assert_allclose(np.asarray(one)[:, 0], np.asarray(out)[:, t], atol=2e-5)
