"""What compressing a model costs: bytes, perplexity and agreement of the shipped demo model on text that it
never saw.

    python benchmarks/studies/quality.py [--tokens 8192] [--cases int8 int4 0.75] [--outliers]

A case of two words with an x has activations in the second scheme too. With --outliers the same function is
measured with 4 channels of each norm 30 x larger, as large models have them.

Prints a markdown table. The text is the validation part of the demo's corpus, the running interpreter's
standard library.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from duetto.checkpoints.huggingface import load_hf
from duetto.model.attention import Attend, causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, Layer, compute_logits, forward
from duetto.model.tree import tree_bytes
from duetto.model.weights.compression.compress import (
    CompressionMethod,
    CompressionPlan,
    compress,
    projection_plan,
    quantise_inputs,
)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "checkpoints" / "demo"
WINDOW, ROWS = 256, 8
OUTLIER_CHANNELS, OUTLIER_FACTOR = 4, 30.0
CASES = (
    "int8", "int8 x int8", "fp8", "fp8 x fp8", "int4", "int4 x int8", "0.9", "0.75", "0.5", "0.25",
    "ffn int4", "ffn 0.5", "head int8", "head int4",
)  # fmt: skip


@dataclass(frozen=True)
class Quality:
    """A compressed model beside the whole one."""

    perplexity: float
    agreement: float  # share of positions whose likeliest token is the whole model's
    divergence: (
        float  # nats by which its distribution differs from the whole model's (Kullback-Leibler), mean
    )
    projections: int  # bytes
    total: int


def held_out(tokens: int) -> np.ndarray:
    """Windows of text that the demo model was not trained on, int32 [windows, WINDOW + 1]."""
    from tokenizers import Tokenizer

    sys.path.insert(0, str(ROOT / "examples"))
    from demo_corpus import blocks, encode, standard_library  # type: ignore[import-not-found]

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = blocks(encode(tokenizer, list(standard_library().validation.values())), WINDOW)
    rows = min(len(found), max(1, tokens // WINDOW))
    return found[:: max(1, len(found) // rows)][:rows]


@partial(jax.jit, static_argnums=(2, 4))
def scores(
    whole: Decoder, params: Decoder, config: ModelConfig, rows: jax.Array, attend: Attend = causal
) -> jax.Array:
    """Sums over rows [B,T+1] of nats per token, of equal likeliest tokens and of divergence, float32 [3].

    `attend` is how the compressed model reads its keys.
    """
    places = jnp.broadcast_to(
        jnp.arange(rows.shape[1] - 1, dtype=jnp.int32)[None], (len(rows), rows.shape[1] - 1)
    )

    def log_probabilities(model: Decoder, attend: Attend) -> jax.Array:
        hidden, _ = forward(model, config, rows[:, :-1], places, attend)
        return jax.nn.log_softmax(compute_logits(model, config, hidden))

    expected, found = log_probabilities(whole, causal), log_probabilities(params, attend)
    nats = -jnp.take_along_axis(found, rows[:, 1:, None], axis=-1).sum()
    equal = (expected.argmax(-1) == found.argmax(-1)).sum().astype(jnp.float32)
    return jnp.stack([nats, equal, (jnp.exp(expected) * (expected - found)).sum()])


def measure(config: ModelConfig, whole: Decoder, params: Decoder, text: np.ndarray) -> Quality:
    """Quality on windows of text [windows,T+1]."""
    count = text[:, 1:].size
    parts = [
        np.asarray(scores(whole, params, config, jnp.asarray(text[i : i + ROWS])), np.float64)
        for i in range(0, len(text), ROWS)
    ]
    nats, equal, divergence = np.sum(parts, axis=0) / count
    layers = tree_bytes(params.layers)
    return Quality(math.exp(nats), equal, divergence, layers, tree_bytes(params))


def plan(case: str) -> CompressionPlan:
    """A case's plan: a scheme or a share for all projections, "ffn" and one for the feed-forward layers, or
    "head" and one for all projections beside an output matrix in int8."""
    *part, how = case.split()
    method: CompressionMethod = how if how.isidentifier() else float(how)  # type: ignore[assignment]
    if part == ["ffn"]:
        return CompressionPlan((("layers.*.ffn.*", method),))
    if part == ["head"]:
        return CompressionPlan((("head", "int8"), ("layers.*", method)))
    return projection_plan(method)


def compressed(params: Decoder, case: str) -> Decoder:
    """The parameters of a case."""
    weights, _, activations = case.partition(" x ")
    return quantise_inputs(compress(params, plan(weights)), activations or None)


def with_outliers(params: Decoder) -> Decoder:
    """The same function: some channels of each norm are larger, and what multiplies them is smaller."""
    D = params.embed.shape[1]
    large = np.linspace(3, D - 5, OUTLIER_CHANNELS).astype(int)
    factor = jnp.ones(D, jnp.float32).at[large].set(OUTLIER_FACTOR)

    def change(layer: Any) -> Layer:
        attention, ffn, norms = layer.attention, layer.ffn, (layer.attention_norm, layer.ffn_norm)
        parts = {name: getattr(attention, name) / factor[:, None, None] for name in ("q", "k", "v")}
        gains = [replace(norm, gain=norm.gain * factor) for norm in norms]
        return replace(
            layer,
            attention=replace(attention, **parts),
            ffn=replace(ffn, gate=ffn.gate / factor[:, None], up=ffn.up / factor[:, None]),
            attention_norm=gains[0],
            ffn_norm=gains[1],
        )

    return replace(params, layers=tuple(map(change, params.layers)))


def row(name: str, found: Quality, whole: Quality) -> str:
    return (
        f"| {name} | {found.projections:,} | {found.projections / whole.projections:.3f} "
        f"| {found.perplexity:.3f} | {found.perplexity / whole.perplexity - 1:+.2%} | {found.agreement:.2%} "
        f"| {found.divergence:.5f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 13, help="of held-out text (default 8192)")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE", help=f"among {', '.join(CASES)}")
    parser.add_argument("--outliers", action="store_true", help="the same function with outlier channels")
    options = parser.parse_args(arguments)
    config, params = load_hf(DEMO, jnp.float32)
    params = with_outliers(params) if options.outliers else params
    params = replace(params, head=params.embed if params.head is None else params.head)
    text = held_out(options.tokens)
    whole = measure(config, params, params, text)
    print(
        "| weights | bytes of the layers | ratio | perplexity | change | same likeliest token "
        "| divergence, nats |"
    )
    print("|---|---|---|---|---|---|---|")
    print(row("float32", whole, whole))
    for case in options.cases:
        print(row(case, measure(config, params, compressed(params, case), text), whole), flush=True)


if __name__ == "__main__":
    main()
