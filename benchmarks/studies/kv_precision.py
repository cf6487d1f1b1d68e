"""What a cache in eight bits costs: quality of the shipped demo model, error of attention, bytes, and the
time of a step of decode on this machine.

    python benchmarks/studies/kv_precision.py [--tokens 16384] [--prompts 64] [--rounds 15]

Prints markdown tables. The text is that of `quality.py`, which the demo model never saw; greedy answers are
compared with those of the same engine and its usual cache. A text that is told twice shows what is still read
from far away. Steps are those of a model of the 135m shape with random weights, timed in turns.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from quality import DEMO, ROWS, held_out, scores

from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import load_hf
from duetto.kvcache.pages import layer_token_bytes
from duetto.kvcache.quantised import SCHEMES, QuantisedPool, choose_cache_format, round_to_pool
from duetto.model.attention import Attend, AttentionParams, causal, dot_product_attention
from duetto.model.tree import init_params
from duetto.model.weights.compression.compress import form_spec
from duetto.model.weights.transposed import transpose_params
from duetto.serve.cli.bench import Bench, BenchModel, group_seconds
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Shape

KEPT = ("auto", "int8", "fp8_e4m3", "fp8_e5m2")
TOLD = 120  # tokens of a text that is told twice
KEYS, OUTLIER = 2048, 20.0  # of attention with random numbers; how much larger one channel of its keys is
STEP, CONTEXT = Shape("decode", 8, 1), 1024


@dataclass(frozen=True)
class Cost:
    """Of one way to keep a cache."""

    perplexity: float
    agreement: float  # share of positions whose likeliest token is that of the usual cache
    divergence: float  # nats by which its distribution differs (Kullback-Leibler), mean
    again: float  # perplexity of a text's second telling
    equal: float  # share of greedy answers that are the usual cache's to the last token
    until: float  # tokens of an answer before the first other one, mean


def as_kept(name: str) -> Attend:
    """The attention without a cache, over keys and values as one would give them back."""
    if name == "auto":
        return causal
    pool = QuantisedPool(None, None, SCHEMES[name].name)

    def attend(state: Any, layer: int, q: Any, k: Any, v: Any, reading: AttentionParams) -> Any:
        return causal(
            state, layer, q, round_to_pool(pool, k), v if v is None else round_to_pool(pool, v), reading
        )

    return attend


def means(params: Any, config: Any, text: np.ndarray, attend: Attend) -> np.ndarray:
    """`scores` a token of windows of text [windows,T+1]."""
    parts = [
        np.asarray(scores(params, params, config, jnp.asarray(text[i : i + ROWS]), attend), np.float64)
        for i in range(0, len(text), ROWS)
    ]
    return np.sum(parts, axis=0) / text[:, 1:].size


def told_again(params: Any, config: Any, text: np.ndarray, attend: Attend) -> float:
    """Perplexity of the second telling of a text."""
    once = text[:, :TOLD]
    twice = np.concatenate([once, once], axis=1)
    first, both = (means(params, config, x, attend)[0] for x in (once, twice))
    return float(np.exp((both * (2 * TOLD - 1) - first * (TOLD - 1)) / TOLD))


def answers(name: str, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with LLM(DEMO, dtype="float32", kv_cache_dtype=name, max_model_len=256) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def quality(text: np.ndarray, prompts: int, tokens: int) -> dict[str, Cost]:
    """Of the demo model, for each way."""
    config, params = load_hf(DEMO, jnp.float32)
    asked, found = [row[:128].tolist() for row in text[:prompts]], {}
    usual = answers("auto", asked, tokens)
    for name in KEPT:
        attend = as_kept(name)
        nats, agreement, divergence = means(params, config, text, attend)
        own = usual if name == "auto" else answers(name, asked, tokens)
        until = [
            next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), tokens)
            for a, b in zip(own, usual, strict=True)
        ]
        again = told_again(params, config, text, attend)
        equal = statistics.mean(n == tokens for n in until)
        found[name] = Cost(np.exp(nats), agreement, divergence, again, equal, statistics.mean(until))
    return found


def attention_error(name: str, outlier: float) -> float:
    """Root mean square error of attention's output over KEYS random keys of heads of the 135m shape, of the
    output's size."""
    mixer: Any = PRESETS["135m"].layers[0].mixer
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (1, n, heads, mixer.head_size))
        for key, n, heads in zip(
            keys, (64, KEYS, KEYS), (mixer.num_heads, *[mixer.num_kv_heads] * 2), strict=True
        )
    )
    k = k.at[..., 0].mul(outlier)
    q = q.at[..., 0].divide(outlier) * 3  # scores vary as much, and some keys count more than others
    reading, mask = AttentionParams(mixer.head_size**-0.5), jnp.ones((1, 64, KEYS), bool)
    whole = dot_product_attention(q, k, v, mask, reading)
    pool = QuantisedPool(None, None, SCHEMES[name].name)
    found = dot_product_attention(q, round_to_pool(pool, k), round_to_pool(pool, v), mask, reading)
    return float(jnp.sqrt(jnp.mean((found - whole) ** 2) / jnp.mean(whole**2)))


def step_seconds(rounds: int, dtype: str) -> dict[str, list[float]]:
    """Seconds of a step of decode in each round, the ways in turns."""
    config = PRESETS["135m"]
    params = transpose_params(
        init_params(jax.random.key(0), form_spec(config, None), jnp.dtype(dtype)), donate=True
    )
    model = BenchModel("135m", config, params, EngineOptions())
    benches = {
        name: Bench(replace(model, options=EngineOptions(kv_cache_dtype=name)), STEP, CONTEXT)
        for name in KEPT
    }
    for bench in benches.values():
        jax.block_until_ready(bench.step())
    found: dict[str, list[float]] = {name: [] for name in KEPT}
    for _ in range(rounds):
        for name, bench in benches.items():
            found[name].append(group_seconds(bench.step, 4))
    return found


def smaller(size: int, name: str) -> float:
    """How many times the tokens of a bfloat16 cache with heads of a size fit."""
    mixer = replace(PRESETS["135m"].layers[0].mixer, head_size=size)
    kind = replace(PRESETS["135m"].layers[0], mixer=mixer)
    return layer_token_bytes(kind, jnp.bfloat16) / layer_token_bytes(
        kind, choose_cache_format(name, jnp.bfloat16)
    )


def print_quality(found: dict[str, Cost], prompts: int, tokens: int) -> None:
    print(
        "| cache | perplexity | change | same likeliest token | divergence, nats | of a second telling",
        end="",
    )
    print(f" | equal answers of {prompts} | tokens before another, of {tokens} |")
    print("|---|---|---|---|---|---|---|---|")
    for name, x in found.items():
        print(
            f"| {name} | {x.perplexity:.3f} | {x.perplexity / found['auto'].perplexity - 1:+.2%} "
            f"| {x.agreement:.2%} | {x.divergence:.5f} | {x.again:.3f} | {x.equal:.0%} | {x.until:.1f} |"
        )


def print_sizes(rounds: int, dtype: str) -> None:
    seconds = step_seconds(rounds, dtype) if rounds else {}
    print(
        f"\n| cache | tokens for those of bfloat16, heads of 64 | of 128 | attention's error, {KEYS} keys",
        end="",
    )
    print(f" | a channel of keys {OUTLIER:.0f} x larger", end="")
    print(f" | ms of {STEP}, context {CONTEXT}, {dtype} | of auto's |")
    print("|---|---|---|---|---|---|---|")
    for name in KEPT:
        cells = [f"{smaller(size, name):.2f}" for size in (64, 128)]
        usual = name == "auto"
        cells += ["0" if usual else f"{attention_error(name, outlier):.4f}" for outlier in (1.0, OUTLIER)]
        if not rounds:
            cells += ["-", "-"]
        else:
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["auto"], strict=True))
            cells += [f"{statistics.median(seconds[name]) * 1e3:.1f}", f"{ratio:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 14, help="of held-out text; 0 leaves quality out")
    parser.add_argument("--prompts", type=int, default=64, help="that are answered greedily (default 64)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer (default 64)")
    parser.add_argument("--rounds", type=int, default=15, help="of timed steps; 0 times nothing (default 15)")
    parser.add_argument("--dtype", default="float32", help="of the timed model (default float32)")
    options = parser.parse_args(arguments)
    if options.tokens:
        text = held_out(options.tokens)
        found = quality(text, options.prompts, options.answer)
        print_quality(found, min(options.prompts, len(text)), options.answer)
    print_sizes(options.rounds, options.dtype)


if __name__ == "__main__":
    main()
