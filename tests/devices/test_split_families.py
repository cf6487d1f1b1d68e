"""Unlike families served by two devices, in parts, by whole experts and in stages, with the tokens of one."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.families.golden import LENGTH, MARGIN, NEW, case_folder, prompts
from cases.weights import decisive
from suite.marks import full_if

from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import read_config
from duetto.kvcache.stages import pipeline_stages
from duetto.model.attention import causal
from duetto.model.config import Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.experts import MoE
from duetto.model.recurrent.kinds import DeltaNet
from duetto.model.sharding import device_bytes
from duetto.model.transformer import compute_logits, forward
from duetto.model.tree import init_params, tree_bytes
from duetto.serve.engine.startup import start
from duetto.serve.runtime.compiled.shapes import Shape

# A prompt of 23 tokens comes in two chunks; two shapes are compiled for each model and layout.
SIZES = {
    "max_num_seqs": 2, "max_prefill_tokens": 16, "max_model_len": 32, "page_size": 16, "reproducible": False,
    "use_tqdm_on_load": False,
}  # fmt: skip
SHAPES = [Shape("prefill", 1, 16), Shape("decode", 2, 1)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
PARTS, WHOLE = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}
STAGED = {"pipeline_parallel_size": 2}
# Those whose layers, or whose ends, are unlike the others'.
FAMILIES = [
    "llama", "mixtral", "gemma2", "deepseek_v3", "gpt_oss", "gpt2", "olmo3", "phi", "cohere2",
]  # fmt: skip
LAYERS = [
    "qwen3", "gemma3_text", "phi3", "deepseek_v2 lite", "gpt_oss plain", "gpt2", "olmo3", "phi",
    "qwen2_moe plain",
    "hunyuan_v1_dense", "stablelm",
]  # fmt: skip
# Of those with experts, the cases in which every layer has them.
MIXTURES = ["mixtral", "qwen3_moe sparse", "deepseek_v2 lite", "deepseek_v3 halves", "qwen2_moe plain"]
SPLIT = [(name, WHOLE) for name in MIXTURES] + [(name, PARTS) for name in LAYERS]


@pytest.fixture(autouse=True)
def two_shapes(unchecked: None, greedy_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.device_count() == 2
    monkeypatch.setattr(start, "engine_shapes", lambda *_: SHAPES)


def generated(llm: LLM) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts(), GREEDY, use_tqdm=False)]


@full_if(lambda name: name != "gpt2")
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_give_the_tokens_of_transformers(name: str, tmp_path: Path):
    """From a folder; an odd number of layers in all but one makes stages unequal."""
    golden = case_folder(name, tmp_path)
    with LLM(tmp_path, dtype="float32", **STAGED, **SIZES) as llm:
        first, last = map(len, pipeline_stages(llm.params))
        assert first != last or llm.config.num_layers == 2
        assert generated(llm) == golden["greedy"]


# ---------------------------------------------------------------- in sizes that two devices split


def even(config: ModelConfig) -> ModelConfig:
    """The same architecture in sizes that two devices split; a single key head stays one."""

    def layer(kind: LayerKind) -> LayerKind:
        mixer, ffn = kind.mixer, kind.ffn
        if isinstance(mixer, Latent):
            mixer = replace(mixer, num_heads=4)
        elif isinstance(mixer, DeltaNet):
            mixer = replace(mixer, key_heads=2, value_heads=4)
        elif isinstance(mixer, GroupedQuery):
            mixer = replace(mixer, num_heads=4, num_kv_heads=4 if mixer.num_kv_heads > 1 else 1)
        if isinstance(ffn, Experts):
            groups = 2 if ffn.groups > 1 else 1
            ffn = replace(
                ffn, count=8, active=2, size=24, shared=2 * ffn.shared, groups=groups, active_groups=groups
            )
        else:
            ffn = replace(ffn, size=2 * ffn.size)
        return LayerKind(mixer, ffn)

    return replace(config, layers=tuple(map(layer, config.layers)))


def drawn(config: ModelConfig) -> Any:
    return jax.jit(lambda key: init_params(key, decisive(config)))(jax.random.key(1))


@full_if(lambda name: name != "qwen3_moe sparse")
@pytest.mark.parametrize("name, layout", SPLIT)
def test_parts_and_whole_experts_give_the_tokens_of_one_device(
    name: str, layout: dict[str, Any], tmp_path: Path
):
    case_folder(name, tmp_path)
    config = even(read_config(tmp_path))
    config = replace(config, layers=tuple(dict.fromkeys(config.layers)))  # each kind once
    params = drawn(config)
    expected = [continued(params, config, prompt) for prompt in prompts()]
    assert (layout is PARTS) or any(isinstance(kind.ffn, Experts) for kind in config.layers)
    with LLM.from_params(config, params, **layout, **SIZES) as llm:
        for layer in llm.params.layers:
            up = (layer.ffn.experts if isinstance(layer.ffn, MoE) else layer.ffn).up
            assert device_bytes(up) * 2 == tree_bytes(up)
        assert generated(llm) == expected


def continued(params: Any, config: ModelConfig, prompt: list[int]) -> list[int]:
    """Greedy tokens without a cache, each by a clear margin."""
    ids = list(prompt)
    for _ in range(NEW):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(ids)] = ids
        found = np.asarray(
            last_logits(params, jnp.asarray(tokens), jnp.asarray([len(ids)], jnp.int32), config)
        )
        second, first = np.sort(found)[-2:]
        assert first - second > MARGIN
        ids.append(int(found.argmax()))
    return ids[len(prompt) :]


@partial(jax.jit, static_argnames="config")
def last_logits(params: Any, tokens: jax.Array, length: jax.Array, config: ModelConfig) -> jax.Array:
    """Of a row [1,T] that is padded, after `length` [1] tokens."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens, positions, causal, lengths=length)
    return compute_logits(params, config, hidden[jnp.arange(1), length - 1])[0]
