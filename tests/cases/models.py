"""Small models of each kind of layer, with sizes that no released model has."""

from dataclasses import replace

from duetto.model.config import (
    Dense,
    Experts,
    GroupedQuery,
    Latent,
    LayerInput,
    LayerKind,
    ModelConfig,
    NormKind,
)
from duetto.model.kinds import Indexer
from duetto.model.recurrent.kinds import DeltaNet
from duetto.model.rope import Rope

TINY = ModelConfig.uniform(
    vocab_size=300,
    hidden_size=48,
    ffn_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=8,
    max_position=512,
    rope=Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=64),
)
ATTENTION = GroupedQuery(6, 2, 8, qk_norm=NormKind(), softcap=8.0, sinks=True, bias=True)
LATENT = Latent(4, rank=16, nope_size=12, rope_size=8, value_size=10, query_rank=24)
EXPERTS = Experts(8, 2, 24, groups=4, active_groups=2, shared=24, correction=True, scoring="sigmoid")
PLAIN = NormKind(gain=False)
CHUNKED = GroupedQuery(
    6, 2, 8, Rope(kind="proportional", partial_rotary_factor=0.5), scale=1.0, window=24, chunked=True,
    qk_norm=PLAIN, norm_after_rope=True, value_norm=PLAIN,
)  # fmt: skip
GROWING = Rope(original_max_position=40, query_growth=0.3, growth_offset=1)
WHOLE = GroupedQuery(6, 1, 16, GROWING, rotary_size=0, keys_as_values=True)
RANDOM = {
    "tiny": TINY,
    "windows": replace(
        TINY,
        layers=(
            LayerKind(replace(ATTENTION, window=20), Dense(96, "gelu_tanh")),
            LayerKind(replace(ATTENTION, window=100), Dense(96, gated=False, bias=True)),
            LayerKind(ATTENTION, Experts(4, 2, 24, "clamped_silu", clamp=2.0, bias=True)),
        ),
        post_norms=True,
        logit_softcap=10.0,
    ),
    "latent": replace(
        TINY,
        layers=(
            LayerKind(replace(LATENT, indexer=Indexer(3, 12, top_k=20, interleaved=True)), Dense(96)),
            LayerKind(LATENT, EXPERTS),
        ),
    ),
    "parallel": replace(
        TINY,
        layers=(
            LayerKind(
                GroupedQuery(
                    6, 2, 8, Rope(original_max_position=64, query_growth=0.3), qk_norm=NormKind(),
                    qk_norm_over="all heads", norm_after_rope=True,
                ),
                Dense(96, "relu2", gated=False),
            ),
            LayerKind(
                GroupedQuery(6, 2, 8, None, qk_norm=NormKind("layer"), qk_norm_over="each head"),
                Experts(4, 2, 24, "relu2", shared=24, shared_gate=True, gated=False),
            ),
        ),
        norm=NormKind("layer"), parallel="one norm", residual_scale=0.7, logit_scale=0.8, head_bias=True,
    ),
    "recurrent": replace(
        TINY,
        layers=(
            LayerKind(DeltaNet(2, 4, 12, 10, kernel=3), Dense(96)),
            LayerKind(replace(ATTENTION, window=20, gated=True), Dense(96)),
            LayerKind(DeltaNet(3, 3, 8, 16, gate="sigmoid", gate_rank=6, decay_rank=5), Experts(4, 2, 24)),
            LayerKind(GroupedQuery(6, 2, 8, rotary_size=4, gated=True), Dense(96)),
        ),
    ),
    "borrowed": replace(  # the first layers' keys by the last
        TINY,
        layers=(
            LayerKind(CHUNKED, Experts(4, 2, 24, scoring="sigmoid", normalised=False, weighs_inputs=True)),
            LayerKind(WHOLE, Dense(96)),
            LayerKind(
                replace(CHUNKED, kv_layers_back=2),
                Experts(4, 2, 24, shared=32, scales=True, norms=NormKind()),
            ),
            LayerKind(replace(WHOLE, kv_layers_back=2), Dense(48)),
        ),
        post_norms=True, layer_scales=True, layer_input=LayerInput(12, 300),
    ),
    "distances": replace(
        TINY,
        layers=(
            LayerKind(GroupedQuery(6, 2, 8, None, alibi=8.0, clip=0.4), Dense(96)),
            LayerKind(GroupedQuery(6, 6, 8, None, alibi=6.0, window=30), Dense(96)),
        ),
        norm=NormKind("layer", gain=False), embedding_norm=True, learned_positions=True, position_offset=2,
    ),
    "gates": replace(
        TINY,
        layers=(
            LayerKind(
                replace(ATTENTION, gated=True, gate_activation="softplus", gate_per_head=True),
                Experts(4, 2, 24, scoring="sparsemixer", jitter=0.2),
            ),
            LayerKind(
                replace(ATTENTION, window=20, gated=True, gate_activation="softplus"),
                Experts(
                    4, 2, 24, router_softcap=2.0, shared=24, shared_scale=0.5, output_norm=NormKind(),
                    scoring="sigmoid", correction=True, corrects_logits=True,
                ),
            ),
            LayerKind(ATTENTION, Dense(96, "xielu", gated=False)),
        ),
    ),
    "longrope": ModelConfig.uniform(
        300, 48, 96, 2, 6, 2, 8, 512,
        rope=Rope(
            kind="longrope", original_max_position=72, short_factors=(1.0, 1.1, 1.3, 1.6),
            long_factors=(1.0, 2.0, 4.0, 7.0), scale=1.19,
        ),
    ),
}  # fmt: skip
