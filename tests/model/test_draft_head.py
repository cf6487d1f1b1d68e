"""The head that guesses: its file, its guesses along chains and trees, and what the shipped one is worth."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import drawn

from duetto.checkpoints.heads import HEADS_FILE, load_head, save_head
from duetto.checkpoints.huggingface import load_hf
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.draft_head import DraftHead, advance_draft_state, draft_head_spec
from duetto.model.transformer import Decoder, compute_logits, decoder_spec, forward
from duetto.model.tree import is_spec, tree_bytes
from duetto.sampling.draft_tree import propose_tree
from duetto.sampling.token_tree import TokenTree

SHIPPED = Path(__file__).resolve().parents[2] / "checkpoints" / "demo-heads"
D, V = 16, 40
CONFIG = ModelConfig.uniform(V, D, 32, 1, 2, 2, 8)


@pytest.fixture(scope="module")
def tiny_head() -> tuple[DraftHead, Decoder]:
    larger = jax.tree.map(lambda s: replace(s, scale=5 * s.scale), draft_head_spec(D, 24), is_leaf=is_spec)
    return drawn(larger), drawn(decoder_spec(CONFIG), seed=1)


@jax.jit
def further(
    head: DraftHead, params: Decoder, state: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state after a token, and the logits there."""
    state = advance_draft_state(head, params, state, token)
    return state, compute_logits(params, CONFIG, state)


def one_by_one(head: DraftHead, params: Decoder, state: jax.Array, token: int, widths: list[int]) -> list:
    """Guesses below a token as nested lists [token, [children]], one product at a time."""
    if not widths:
        return []
    state, logits = further(head, params, state, np.int32(token))
    best = np.argsort(-np.asarray(logits), kind="stable")[: widths[0]]
    return [[int(t), one_by_one(head, params, state, int(t), widths[1:])] for t in best]


def nested(tree: TokenTree, tokens: np.ndarray, node: int = 0) -> list:
    return [[int(tokens[c]), nested(tree, tokens, c)] for c in tree.children[node] if c >= 0]


@pytest.mark.parametrize("widths", [[1], [1, 1, 1, 1], [3], [3, 2, 1]], ids=str)
def test_draft_trees_equal_tokens_proposed_one_by_one(tiny_head, widths: list[int]):
    head, params = tiny_head
    tree, hidden = (
        TokenTree.from_widths(widths),
        np.random.default_rng(5).normal(size=(3, D)).astype(np.float32),
    )
    tokens = jax.jit(propose_tree, static_argnames=("config", "tree"))(
        head, params, CONFIG, hidden, np.array([4, 9, 9], np.int32), tree
    )
    tokens = np.asarray(tokens)
    assert tokens[:, 0].tolist() == [4, 9, 9]
    for row in range(3):
        want = one_by_one(head, params, hidden[row], int(tokens[row, 0]), widths)
        assert nested(tree, tokens[row]) == want


def test_a_head_is_read_as_it_was_written(tiny_head, tmp_path: Path):
    head, _ = tiny_head
    save_head(tmp_path, head, np.float32)
    again = load_head(tmp_path, D, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, head, again)


def test_what_is_no_head_is_refused(tiny_head, tmp_path: Path):
    head, _ = tiny_head
    with pytest.raises(CheckpointError, match="no such file"):
        load_head(tmp_path, D, jnp.float32)
    save_head(tmp_path, head)
    with pytest.raises(CheckpointError, match=r"hidden has shape \[16, 24\], expected \[17, 24\]"):
        load_head(tmp_path, D + 1, jnp.float32)
    file = tmp_path / HEADS_FILE
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="cut off"):
        load_head(tmp_path, D, jnp.float32)
    save_head(tmp_path, DraftHead(head.hidden, np.full_like(head.token, np.nan), head.out))
    with pytest.raises(CheckpointError, match="token holds a number that is not finite"):
        load_head(tmp_path, D, jnp.float32)


@pytest.mark.full
def test_the_shipped_head_is_small_and_drafts_demo_tokens():
    """Along the demo model's own greedy text; the bound leaves room below what was measured."""
    config, params = load_hf(SHIPPED.parent / "demo", jnp.float32)
    head = load_head(SHIPPED, config.hidden_size, jnp.float32)
    assert (SHIPPED / HEADS_FILE).stat().st_size < 2_000_000 and tree_bytes(head) < 4_000_000
    tokens = greedy(config, params, count=96)

    @jax.jit
    def guessed(head: DraftHead, params: Decoder, tokens: jax.Array) -> jax.Array:
        hidden = forward(params, config, tokens, jnp.arange(tokens.shape[1])[None], causal)[0][0]
        return propose_tree(head, params, config, hidden[:-3], tokens[0, 1:-2], TokenTree.from_widths((1, 1)))

    found, tokens = np.asarray(guessed(head, params, tokens)), np.asarray(tokens)
    right = found[:, 1:] == np.stack([tokens[0, 2:-1], tokens[0, 3:]], axis=1)
    assert right[:, 0].mean() > 0.35 and right.all(1).mean() > 0.2


def greedy(config: ModelConfig, params: Decoder, count: int) -> jax.Array:
    """Greedy tokens after the text's first one, [1, count]."""

    def one(i: jax.Array, tokens: jax.Array) -> jax.Array:
        hidden = forward(params, config, tokens, jnp.arange(count)[None], causal)[0]
        return tokens.at[0, i + 1].set(
            jnp.argmax(compute_logits(params, config, hidden[0, i])).astype(jnp.int32)
        )

    return jax.jit(lambda: jax.lax.fori_loop(0, count - 1, one, jnp.zeros((1, count), jnp.int32)))()
