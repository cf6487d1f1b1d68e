"""Train the head that drafts tokens for the demo model, on the corpus that the model itself was trained on.

    python examples/train_heads.py --target checkpoints/demo --out checkpoints/demo-heads

The model is frozen; the head learns its distribution at each of the next DEPTH positions (cross entropy with
the model's own probabilities, Hinton et al., arXiv 1503.02531), with the text's tokens in between. A run
depends on the standard library, the seed and the number of steps, never on the clock; killed and started
again, it resumes from the newest checkpoint.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_corpus import blocks, encode, standard_library
from demo_fit import Phase, Recipe, record, windows
from tokenizers import Tokenizer

from duetto.checkpoints.heads import HEADS_FILE, load_head, save_head
from duetto.checkpoints.huggingface import load_hf
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.draft_head import DraftHead, advance_draft_state, draft_head_spec
from duetto.model.transformer import Decoder, compute_logits, forward
from duetto.model.tree import init_params

DEPTH = 4  # consecutive draft tokens that are trained
INNER = 512  # F
BATCH, CONTEXT = 4, 128
STEPS = 1000
Target = tuple[ModelConfig, Decoder]


def recipe(config: ModelConfig, steps: int, seed: int) -> Recipe:
    return Recipe(
        config,
        (Phase(steps, BATCH, CONTEXT + DEPTH),),
        learning_rate=4e-3,
        warmup=50,
        weight_decay=0.01,
        seed=seed,
        evaluate_every=250,
    )


def guesses(head: DraftHead, target: Target, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logits of the head and of the model for the same positions of a window [B,T+1]: each [DEPTH,
    B, T-DEPTH, V].

    Draft token i after position t predicts token t+2+i, by the hidden state of t and the tokens t+1 .. t+1+i.
    """
    config, params = target
    T = window.shape[1] - 1
    places = jnp.broadcast_to(jnp.arange(T), (window.shape[0], T))
    hidden, _ = forward(params, config, window[:, :-1], places, causal)
    own = compute_logits(params, config, hidden)
    state = hidden[:, : T - DEPTH]
    found = []
    n = T - DEPTH
    for i in range(DEPTH):
        state = advance_draft_state(head, params, state, window[:, 1 + i : 1 + i + n])
        found.append((compute_logits(params, config, state), own[:, 1 + i : 1 + i + n]))
    guessed, wanted = zip(*found, strict=True)
    return jnp.stack(guessed), jnp.stack(wanted)


def make_step(plan: Recipe) -> Callable:
    """`step(state, params, window) -> state, loss`, jitted with the state donated."""
    optimizer = plan.optimizer()

    def loss(head: DraftHead, params: Decoder, window: jax.Array) -> jax.Array:
        guessed, wanted = guesses(head, (plan.config, params), window)
        return optax.softmax_cross_entropy(guessed, jax.nn.softmax(wanted)).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: tuple, params: Decoder, window: jax.Array) -> tuple:
        head, moments = state
        value, gradient = jax.value_and_grad(loss)(head, params, window)
        updates, moments = optimizer.update(gradient, moments, head)
        return (optax.apply_updates(head, updates), moments), value

    return step


@partial(jax.jit, static_argnums=1)
def agreement(head: DraftHead, config: ModelConfig, params: Decoder, window: jax.Array) -> jax.Array:
    """Return shares of the positions of a window, [DEPTH, 4]: the model's likeliest token is the head's
    first; it is among the head's first three; it is the head's first at all depths so far; and the overlap of
    both distributions.
    """
    guessed, wanted = guesses(head, (config, params), window)
    top, likeliest = jax.lax.top_k(guessed, 3)[1], jnp.argmax(wanted, axis=-1)
    first = top[..., 0] == likeliest
    among = jnp.any(top == likeliest[..., None], axis=-1)
    in_a_row = jnp.cumprod(first, axis=0)
    shared = jnp.minimum(jax.nn.softmax(guessed), jax.nn.softmax(wanted)).sum(-1)
    return jnp.stack([x.astype(jnp.float32).mean((1, 2)) for x in (first, among, in_a_row, shared)], axis=1)


def evaluate(head: DraftHead, target: Target, stream: np.ndarray, every: int = 1) -> np.ndarray:
    """`agreement` over every `every`-th window of a stream, float [DEPTH, 4]."""
    config, params = target
    rows = blocks(stream, CONTEXT + DEPTH)[::every]
    return np.mean([agreement(head, config, params, row[None]) for row in rows], axis=0)


def fit(plan: Recipe, target: Target, streams: tuple[np.ndarray, np.ndarray], work: Path) -> DraftHead:
    """Train a head to the last step, from the newest checkpoint in `work` if there is one; history in
    `history.jsonl`."""
    import orbax.checkpoint as ocp

    train, held_out = streams
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(work.absolute() / "state", options=options) as manager:
        head: Any = init_params(jax.random.key(plan.seed), draft_head_spec(plan.config.hidden_size, INNER))
        state = (head, plan.optimizer().init(head))
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        step = make_step(plan)
        losses = []
        clock = time.perf_counter()
        for number, window in enumerate(windows(plan, train, done), done + 1):
            state, loss = step(state, target[1], window)
            losses.append(loss)
            if number % plan.evaluate_every == 0 or number == plan.steps:
                shares = evaluate(state[0], target, held_out, every=40)
                figures = {"step": number, "train": float(np.mean(losses))}
                figures |= {f"top1_{i + 1}": float(share[0]) for i, share in enumerate(shares)}
                figures["seconds"] = time.perf_counter() - clock
                losses = []
                clock = time.perf_counter()
                manager.save(number, args=ocp.args.StandardSave(state))
                record(work / "history.jsonl", figures)
    return state[0]


def write_card(out: Path, plan: Recipe, target: Path, shares: np.ndarray) -> None:
    """README.md: what the head is, and its agreement with the model on text that neither has seen."""
    rows = "\n".join(
        f"| {i} | {first:.1%} | {among:.1%} | {row:.1%} | {shared:.1%} |"
        for i, (first, among, row, shared) in enumerate(shares.tolist(), 1)
    )
    tokens = plan.steps * BATCH * (CONTEXT + DEPTH)
    card = f"""# duetto demo, the head

A head that guesses the next tokens of `{target.name}` from its last hidden state (`model/draft_head.py`):
a recurrent block of {plan.config.hidden_size} x {INNER} units under the model's own output embedding,
applied once for each guess.
`{HEADS_FILE}`: {(out / HEADS_FILE).stat().st_size:,} bytes, half precision. Figures are of this file.

## Agreement with the model on held-out text

Along the validation files (every fourth window of {CONTEXT + DEPTH} tokens, text in between as it is
written): the model's likeliest token is the head's likeliest, is among its three likeliest, has been its
likeliest for this guess and all before it; and the share of probability that the two distributions have in
common, which is what rejection sampling accepts at temperature 1.

| guess | first | first three | in a row | shared |
|---|---|---|---|---|
{rows}

## Training

`python examples/train_heads.py --target {target} --out {out} --seed {plan.seed}`

{plan.steps} steps of {BATCH} x {CONTEXT + DEPTH} tokens ({tokens / 1e6:.1f} M) of Python's standard
library, as in the model's own card, whose licence notes hold here too (`LICENSE`). The model is
frozen; the loss is the cross entropy with its probabilities.
"""
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, help="the Hugging Face folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--work", type=Path, help="checkpoints and history (default: build/<name of OUT>)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    corpus, target = standard_library(), load_hf(args.target, jnp.float32)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    train, held_out = (encode(tokenizer, list(t.values())) for t in (corpus.train, corpus.validation))
    work = args.work or Path("build") / args.out.name
    plan = recipe(target[0], args.steps, args.seed)
    work.mkdir(parents=True, exist_ok=True)
    save_head(args.out, fit(plan, target, (train, held_out), work))
    kept = load_head(args.out, target[0].hidden_size, jnp.float32)
    shares = evaluate(kept, target, held_out, every=4)
    write_card(args.out, plan, args.target, shares)
    print(np.round(shares, 4))


if __name__ == "__main__":
    main()
