"""Sizes of well-known models, for plans and measurements without their weights."""

from math import log

from ....model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig, NormKind
from ....model.recurrent.kinds import DeltaNet
from ....model.rope import Rope

QWEN3_MOE = LayerKind(
    GroupedQuery(32, 4, 128, Rope(1e6), qk_norm=NormKind(eps=1e-6)), Experts(count=128, active=8, size=768)
)


DEEPSEEK = Latent(
    128, 512, 128, 64, 128, 1536,
    Rope(10000.0, "yarn", factor=40.0, original_max_position=4096, interleaved=True),
    scale=192**-0.5 * (0.1 * log(40) + 1) ** 2,
)  # fmt: skip
DEEPSEEK_EXPERTS = Experts(
    256, 8, 2048, scoring="sigmoid", factor=2.5, correction=True, groups=8, active_groups=4,
    group_score="top2", shared=2048,
)  # fmt: skip


def gated_delta_layers(
    num_heads: int, num_kv_heads: int, ffn: Dense | Experts, periods: int
) -> tuple[LayerKind, ...]:
    """Return the layers of Qwen3-Next and Qwen 3.5: three with a state before each with attention."""
    norm = NormKind(eps=1e-6, offset=1.0)
    attention = GroupedQuery(
        num_heads, num_kv_heads, 256, Rope(1e7), rotary_size=64, qk_norm=norm, gated=True
    )
    return periods * (*3 * (LayerKind(DeltaNet(16, 32, 128, 128), ffn),), LayerKind(attention, ffn))


def gpt_oss_layer(window: int | None) -> LayerKind:
    """Return one of the two layer kinds that alternate in gpt-oss-20b, with or without a window."""
    rope = Rope(150000.0, "yarn", factor=32.0, original_max_position=4096, truncate=False)
    return LayerKind(
        GroupedQuery(64, 8, 64, rope, window=window, bias=True, output_bias=True, sinks=True),
        Experts(32, 4, 2880, "clamped_silu", bias=True, router_bias=True, clamp=7.0),
    )


PRESETS = {
    "135m": ModelConfig.uniform(
        49152, 576, 1536, 30, 9, 3, 64, 8192, tied_embeddings=True, rope=Rope(100000.0)
    ),
    "360m": ModelConfig.uniform(
        49152, 960, 2560, 32, 15, 5, 64, 8192, tied_embeddings=True, rope=Rope(100000.0)
    ),
    "0.6b": ModelConfig.uniform(
        151936, 1024, 3072, 28, 16, 8, 128, 32768, tied_embeddings=True, rope=Rope(1e6)
    ),
    "8b": ModelConfig.uniform(128256, 4096, 14336, 32, 32, 8, 128, 8192, rope=Rope(500000.0)),
    "30b-a3b": ModelConfig(151936, 2048, 48 * (QWEN3_MOE,), 40960, norm=NormKind(eps=1e-6)),
    "deepseek-v3": ModelConfig(
        129280,
        7168,
        3 * (LayerKind(DEEPSEEK, Dense(18432)),) + 58 * (LayerKind(DEEPSEEK, DEEPSEEK_EXPERTS),),
        163840,
        norm=NormKind(eps=1e-6),
    ),
    "qwen3-next-80b": ModelConfig(
        151936, 2048, gated_delta_layers(16, 2, Experts(512, 10, 512, shared=512, shared_gate=True), 12),
        262144, norm=NormKind(eps=1e-6, offset=1.0),
    ),
    "qwen3.5-4b": ModelConfig(
        248320, 2560, gated_delta_layers(16, 4, Dense(9216), 8), 262144, norm=NormKind(eps=1e-6, offset=1.0),
        tied_embeddings=True,
    ),
    "gpt-oss-20b": ModelConfig(201088, 2880, 12 * (gpt_oss_layer(128), gpt_oss_layer(None)), 131072),
}  # fmt: skip
