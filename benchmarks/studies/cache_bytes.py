"""Bytes of the KV cache: latent attention beside the other kinds, and windowed layers beside full ones, as
markdown tables.

    python benchmarks/studies/cache_bytes.py

The bytes are those of the cache's own arrays, made without numbers in them; sizes of models are the published
ones.
"""

import jax
import jax.numpy as jnp

from duetto.kvcache.pages import empty_cache
from duetto.kvcache.tables import NULL_PAGE, PageTables
from duetto.model.config import Dense, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.kinds import Indexer
from duetto.model.tree import tree_bytes

PAGE, CHUNK = 64, 512
# layers, and how they mix
LATENTS = {
    "DeepSeek-V2-Lite": (27, Latent(16, rank=512, nope_size=128, rope_size=64, value_size=128)),
    "DeepSeek-V3": (61, Latent(128, 512, nope_size=128, rope_size=64, value_size=128, query_rank=1536)),
    "DeepSeek-V3.2": (61, Latent(128, 512, 128, 64, 128, 1536, indexer=Indexer(64, 128, top_k=2048))),
}
# layers, the windows of a period of layers, KV heads and head size
WINDOWED = {
    "Mistral-7B-v0.1": (32, (4096,), 8, 128),
    "Gemma-2-9B": (42, (4096, None), 8, 256),
    "Gemma-3-1B": (26, (512,) * 5 + (None,), 1, 256),
    "gpt-oss-20b": (24, (128, None), 8, 64),
}


def model(mixers: list[GroupedQuery | Latent], D: int = 64) -> ModelConfig:
    return ModelConfig(64, D, tuple(LayerKind(mixer, Dense(64)) for mixer in mixers), max_position=1 << 20)


def bytes_of(config: ModelConfig, pages: list[int]) -> int:
    """Bytes in bfloat16 of a cache with `pages` of each window."""
    return tree_bytes(jax.eval_shape(lambda: empty_cache(config.layers, pages, PAGE, jnp.bfloat16)))


def per_token(mixer: GroupedQuery | Latent, layers: int) -> float:
    return bytes_of(model([mixer] * layers), [1]) / PAGE


def latent_row(name: str) -> str:
    """One model with its attention as it is, and with the heads' own keys and values cached instead."""
    layers, m = LATENTS[name]
    head, groups = m.nope_size, m.num_heads // 8
    kinds = [m] + [GroupedQuery(m.num_heads, K, head) for K in (m.num_heads, groups, 1)]
    found = [per_token(kind, layers) for kind in kinds]
    cells = " | ".join(f"{x / 1024:.1f} ({x / found[0]:.1f} x)" for x in found)
    return f"| {name} | {cells} |"


def owned_pages(windows: tuple[int | None, ...], context: int) -> list[int]:
    """Pages of each group that a request owns after `context` tokens, read in chunks."""
    tables = PageTables(windows, (1 << 20,) * len(windows), PAGE, CHUNK)
    sequence = tables.admit(tables.find_prefix([]), context, max_tokens=context + 1)
    for start in range(0, context, CHUNK):
        tables.advance_windows(sequence, start, min(start + CHUNK, context))
    tables.advance_windows(sequence, context, context + 1)
    tables.grow(sequence, context + 1)
    return [sum(page != NULL_PAGE for page in pages) for pages in sequence]


def windowed_row(name: str, contexts: tuple[int, ...]) -> str:
    """MiB of one request, with the windows' pages given back and with all kept."""
    layers, period, K, H = WINDOWED[name]
    windowed = model([GroupedQuery(K, K, H, window=period[i % len(period)]) for i in range(layers)])
    full = model([GroupedQuery(K, K, H)] * layers)
    cells = []
    for context in contexts:
        ours = bytes_of(windowed, owned_pages(windowed.windows, context))
        all_kept = bytes_of(full, owned_pages(full.windows, context))
        cells.append(f"{ours / 2**20:.1f} of {all_kept / 2**20:.1f}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    print("KiB of cache per token in bfloat16, all layers (and against MLA):\n")
    print("| model | MLA | MHA | GQA, 8 query heads a key head | MQA |\n|---|---|---|---|---|")
    print("\n".join(map(latent_row, LATENTS)))
    contexts = 1024, 8192, 32768
    print("\nMiB that one request owns, of what it would own without windows, bfloat16:\n")
    print(f"| model | {' | '.join(f'{n} tokens' for n in contexts)} |\n|---|---|---|---|")
    print("\n".join(windowed_row(name, contexts) for name in WINDOWED))


if __name__ == "__main__":
    main()
