"""Families of models by the `model_type` of their `config.json`: each is one module that translates, and
nothing else."""

from collections.abc import Mapping

from . import (
    arcee,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    exaone4,
    gemma2,
    gemma3_text,
    gpt2,
    gpt_neox,
    gpt_oss,
    internlm3,
    llama,
    mistral,
    mixtral,
    nemotron,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    stablelm,
    starcoder2,
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
    "starcoder2": starcoder2.FAMILY,
    "stablelm": stablelm.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "phi": phi.FAMILY,
    "nemotron": nemotron.FAMILY,
    "arcee": arcee.FAMILY,
    "cohere": cohere.FAMILY,
    "cohere2": cohere2.FAMILY,
    "exaone4": exaone4.FAMILY,
    "internlm3": internlm3.FAMILY,
}
UNSUPPORTED = {
    "gemma3": (
        "a model of images and text, which is not supported: expected 'gemma3_text', its text part alone"
    ),
}
