"""Families of models by the `model_type` of their `config.json`: each is one module that translates, and
nothing else."""

from collections.abc import Mapping

from . import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3_text,
    gpt2,
    gpt_oss,
    granite,
    granitemoe,
    hunyuan_v1_dense,
    llama,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from .family import Family

FAMILIES: Mapping[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "phi3": phi3.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "gpt2": gpt2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "olmo2": olmo2.FAMILY,
    "olmo3": olmo3.FAMILY,
    "granite": granite.FAMILY,
    "granitemoe": granitemoe.FAMILY,
    "hunyuan_v1_dense": hunyuan_v1_dense.FAMILY,
    "ministral3": ministral3.FAMILY,
}
