"""At which model size a head or a draft model pays: times of a decode step, and of a guess of either, with
random weights.

    python benchmarks/studies/drafter_sizes.py [--sizes demo 135m 360m 0.6b] [--rows 8]

A step is the model's products for `rows` rows of one token, without a cache; guesses are one row's. The draft
model has two layers of a quarter of the width.
With k guesses of which a share `a` is right, a pass gives (1 - a^(k+1)) / (1 - a) tokens for 1 + k c steps
(Leviathan et al., arXiv 2211.17192); the share from which k guesses pay follows. Prints a markdown table.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.draft_head import advance_draft_state, draft_head_spec
from duetto.model.transformer import compute_logits, decoder_spec, forward
from duetto.model.tree import init_params
from duetto.serve.planner.roofline.presets import PRESETS

MODELS: dict[str, ModelConfig] = {
    "demo": ModelConfig.uniform(2048, 192, 512, 5, 6, 2, 32, 512, tied_embeddings=True),
    **{name: PRESETS[name] for name in ("135m", "360m", "0.6b")},
}
GUESSES, REPEATS = (1, 3), 9


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    compiled = jax.jit(run).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def drafter_of(config: ModelConfig) -> ModelConfig:
    D = max(64, config.hidden_size // 4)
    heads = max(1, D // 64)
    return ModelConfig.uniform(config.vocab_size, D, 3 * D, 2, 2 * heads, heads, 32, 512)


def step(config: ModelConfig) -> Callable[..., Any]:
    def one(params: Any, tokens: Any) -> Any:
        hidden, _ = forward(params, config, tokens, jnp.zeros_like(tokens), causal)
        return jnp.argmax(compute_logits(params, config, hidden[:, 0]), axis=-1)

    return one


def times(config: ModelConfig, rows: int) -> tuple[float, float, float]:
    """Seconds of a step, of a guess of a head as wide as the model, and of one of a draft model."""
    D, key = config.hidden_size, jax.random.key(0)
    params: Any = init_params(key, decoder_spec(config), jnp.float32)
    head: Any = init_params(key, draft_head_spec(D, D), jnp.float32)

    def guess(head: Any, params: Any, state: Any, token: Any) -> Any:
        return jnp.argmax(
            compute_logits(params, config, advance_draft_state(head, params, state, token)), axis=-1
        )

    one, whole = jnp.zeros(1, jnp.int32), jnp.zeros((rows, 1), jnp.int32)
    small = drafter_of(config)
    draft: Any = init_params(key, decoder_spec(small), jnp.float32)
    return (
        seconds(step(config), params, whole),
        seconds(guess, head, params, jnp.zeros((1, D)), one),
        seconds(step(small), draft, whole[:1]),
    )


def break_even(k: int, c: float) -> float | None:
    """The share right from which k guesses pay, None if none does."""
    cost = 1 + k * c
    if cost >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(k + 1)) < cost else (low, a)
    return high


def share(a: float | None) -> str:
    return "never" if a is None else f"{a:.0%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, default=8, help="rows that a step computes; 8 without it")
    options = parser.parse_args(arguments)
    print(
        f"float32, jax {jax.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n"
    )
    print(
        "| model | step | a head's guess | pays from, k = 1 | k = 3 | a draft's | pays from, k = 1 | k = 3 |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.sizes:
        whole, head, draft = times(MODELS[name], options.rows)
        cells = [name, f"{1e3 * whole:.2f} ms"]
        for guess in (head, draft):
            cells += [f"{1e3 * guess:.2f} ms", *(share(break_even(k, guess / whole)) for k in GUESSES)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
