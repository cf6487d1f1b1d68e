"""Model families by the `model_type` of their `config.json`. Each is one module that translates, and nothing
else."""

from collections.abc import Mapping
from importlib import import_module

from .family import Family

MODEL_TYPES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "gemma", "gemma2", "gemma3_text", "gemma4_text", "llama4_text", "phi3",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "gpt_oss", "smollm3", "glm", "glm4", "glm4_moe",
    "ernie4_5", "ernie4_5_moe", "seed_oss", "dots1", "minimax_m2", "gpt2", "qwen2_moe", "olmo2", "olmo3",
    "olmoe", "granite", "granitemoe", "hunyuan_v1_dense", "ministral3", "starcoder2", "stablelm", "gpt_neox",
    "phi", "nemotron", "arcee", "cohere", "cohere2", "exaone4", "internlm3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba2", "granitemoehybrid", "falcon_h1", "qwen2_vl_text", "qwen2_5_vl_text",
    "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text", "bamba", "nemotron_h", "exaone",
    "helium", "vaultgemma", "minicpm3", "gptj", "codegen", "gpt_bigcode", "gpt_neo", "opt", "olmo", "falcon",
    "nanochat", "dbrx", "mpt", "bloom", "cwm", "granitemoeshared", "exaone_moe", "hunyuan_v1_moe",
    "glm4_moe_lite", "solar_open", "phimoe", "hy_v3", "afmoe", "apertus", "jais2", "mellum", "iquestcoder",
    "youtu", "granite_swa", "granitemoe_swa", "cohere2_moe", "sarvam_moe", "sarvam_mla", "axk1", "laguna",
    "flex_olmo", "glm_moe_dsa", "kolibri1",
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {name: import_module(f"{__package__}.{name}").FAMILY for name in MODEL_TYPES}
