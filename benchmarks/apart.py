"""Makes the table of docs/parallelism.md on attention and feed-forward layers apart:
python -m benchmarks.apart (computed from published sizes and vendors' peaks, nothing is measured)."""

from collections.abc import Iterator
from pathlib import Path

from duetto.model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig
from duetto.model.rope import Rope
from duetto.serve.planner.roofline.ffn_disaggregation import Cluster, ModelHalves
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import GPUS

from .tuning import filled, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallelism.md"
HEAD = (
    "model | devices | context | keys a token | ridge | together: rows, tokens/s a device "
    "| apart: attention + FFN, rows, FFN batch, tokens/s a device | apart / together"
)
# arXiv 2412.19437 and the config.json beside its weights
DEEPSEEK_V3 = ModelHalves.from_config(PRESETS["deepseek-v3"])
DENSE_8B = ModelHalves.from_config(PRESETS["8b"], param_bytes=2, key_element_bytes=2)
CLUSTERS = ("h200", 16), ("h200", 32), ("h200", 128)
CONTEXTS = 4096, 32768


def step_3() -> ModelHalves:
    """Step-3 (arXiv 2507.19427, and the configuration beside its weights): one key head for 64 of queries,
    which come from a rank of 2048; five dense layers, one of them the last; 48 experts and a shared one."""
    D, heads, size, rank, V = 7168, 64, 256, 2048, 128815
    attention = GroupedQuery(heads, 1, size, Rope(5e5))
    dense = LayerKind(attention, Dense(18432))
    mixture = LayerKind(attention, Experts(48, 3, 5120, shared=5120))
    layers = (*4 * (dense,), *56 * (mixture,), dense)
    each = D * rank + rank * heads * size + 2 * D * size + heads * size * D
    return ModelHalves(ModelConfig(V, D, layers, 65536), len(layers) * each + V * D)


def rows() -> Iterator[list[str]]:
    for name, sides in {"DeepSeek-V3": DEEPSEEK_V3, "Step-3": step_3()}.items():
        for kind, count in CLUSTERS:
            for context in CONTEXTS:
                yield row(name, sides, kind, count, context)
    for kind in ("h200", "h100"):
        yield row("8B, dense, 16 bits", DENSE_8B, kind, 16, 4096)


def row(name: str, sides: ModelHalves, kind: str, count: int, context: int) -> list[str]:
    cluster = Cluster(GPUS[kind], count, context)
    one, two = cluster.best_colocated_decode(sides), cluster.best_disaggregated_decode(sides)
    assert one is not None and two is not None
    return [
        name,
        f"{count} {kind.upper()}",
        str(context),
        f"{sides.cached_token_bytes / 1024:.1f} KiB",
        f"{sides.ridge_point(GPUS[kind]):.0f}",
        f"{one.rows}, {one.rate:.0f}",
        f"{two.attending} + {count - two.attending}, {two.rows}, {two.batch}, {two.rate:.0f}",
        f"{two.rate / one.rate:.2f}",
    ]


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), "apart", table(HEAD, rows())))


if __name__ == "__main__":
    main()
