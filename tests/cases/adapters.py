"""Adapters as PEFT writes them, made from seeds, and what they are merged into the weights."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from duetto.checkpoints.adapters.adapter import Adapter, AdapterReader, lora_a_storage, lora_b_storage
from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.layout import ParameterGroup, parameter_groups
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def write(
    folder: Path,
    config: ModelConfig,
    rank: int,
    seed: int,
    modules: tuple[str, ...] = ALL,
    scale: float = 0.15,
    **fields: Any,
) -> Path:
    """The folder of a random adapter, whose terms are as large as the weights; `fields` are in its
    configuration."""
    rng, tensors = np.random.default_rng(seed), {}
    for group in parameter_groups(FAMILIES["llama"].names, config):
        module = group.names[0].removesuffix(".weight")
        if module.endswith(modules):
            out, inner = group.shape
            for name, shape in (("lora_A", (rank, inner)), ("lora_B", (out, rank))):
                number = scale * rng.standard_normal(shape)
                tensors[f"base_model.model.{module}.{name}.weight"] = number.astype(np.float32)
    return written(folder, tensors, {"r": rank, "lora_alpha": 2 * rank, **fields})


def written(folder: Path, tensors: dict[str, np.ndarray], fields: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    whole = {"peft_type": "LORA", "bias": "none", "use_dora": False, "target_modules": "all-linear"} | fields
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def read(folder: Path, config: ModelConfig, dtype: Any = np.float32, most: int = 64) -> Adapter:
    return AdapterReader(FAMILIES["llama"], config, dtype, most).read(folder, folder.name)


def merged(params: Decoder, adapter: Adapter) -> Decoder:
    """The weights with the products of an adapter's terms added to them."""

    def leaf(key: Any, weight: Any) -> Any:
        terms = adapter.terms.get(jax.tree_util.keystr(key, simple=True, separator="."))
        if terms is None:
            return weight
        a, b = (np.asarray(x, np.float32) for x in terms)
        stacked = a.ndim + b.ndim - 2 > weight.ndim  # of experts
        product = (
            np.stack([np.tensordot(*one, axes=1) for one in zip(a, b, strict=True)]) if stacked else None
        )
        both = (np.tensordot(a, b, axes=1) if product is None else product) + np.asarray(weight, np.float32)
        return jax.device_put(both.astype(weight.dtype))

    return jax.tree_util.tree_map_with_path(leaf, params)


def written_as(folder: Path, config: ModelConfig, terms: dict[str, Any], rank: int) -> Path:
    """The folder of an adapter with these terms, by paths, whose scale is 1."""
    tensors = {}
    for group in parameter_groups(FAMILIES["llama"].names, config):
        (parameter,), module = group.parameters, group.names[0].removesuffix(".weight")
        if parameter.path in terms:
            a, b = (np.array(x, np.float32) for x in terms[parameter.path])
            first, second = (
                ParameterGroup((lora_a_storage(parameter, rank),), ()),
                lora_b_storage(group, rank),
            )
            for name, own, array in (("lora_A", first, a), ("lora_B", second, b)):
                numbers = own.tensor_views([array], 0).file_values().reshape(own.shape)
                tensors[f"base_model.model.{module}.{name}.weight"] = np.ascontiguousarray(numbers)
    return written(folder, tensors, {"r": rank, "lora_alpha": rank})
