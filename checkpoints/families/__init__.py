"""Families of models by the `model_type` of their `config.json`: each is one module that translates, and
nothing else."""

from collections.abc import Mapping

from . import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    gemma,
    gemma2,
    gemma3_text,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    kimi_k2,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from .family import Family

FAMILIES: Mapping[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "phi3": phi3.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "kimi_k2": kimi_k2.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "glm": glm.FAMILY,
    "glm4": glm4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "ernie4_5": ernie4_5.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "dots1": dots1.FAMILY,
    "minimax_m2": minimax_m2.FAMILY,
    "gpt2": gpt2.FAMILY,
}
UNSUPPORTED = {
    "gemma3": (
        "a model of images and text, which is not supported: expected 'gemma3_text', its text part alone"
    ),
}
