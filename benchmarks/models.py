"""Models with random weights for every engine: a Hugging Face folder, and the same numbers as GGUF files for
llama.cpp.

The weights are drawn in bfloat16, so that float32 and bfloat16 engines compute with the same numbers.
"""

import importlib
import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

# names of a layer's tensors, Hugging Face's and llama.cpp's
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def cache() -> Path:
    """Where models are kept between runs: `duetto/benchmarks` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / "benchmarks"


def folder_for(shape: str, parent: Path) -> Path:
    """The folder of a preset's model under `parent`; written if it is not there."""
    folder = parent / shape
    if not (folder / "config.json").exists():
        write(shape, folder)
    return folder


def write(shape: str, folder: Path) -> None:
    """A preset as a Hugging Face Llama in bfloat16, without a tokenizer: engines are given token ids."""
    import jax
    import jax.numpy as jnp

    from duetto.checkpoints.huggingface import save_hf
    from duetto.model.transformer import decoder_spec
    from duetto.model.tree import init_params
    from duetto.serve.planner.roofline.presets import PRESETS

    config = PRESETS[shape]
    save_hf(folder, config, init_params(jax.random.key(0), decoder_spec(config), jnp.dtype("bfloat16")))


def gguf_for(folder: Path, dtype: str) -> Path:
    """The folder's model as a GGUF file in the cache, "float32" or "bfloat16"; written if it is not there.

    Raises ImportError without the package gguf.
    """
    weights = folder.resolve() / "model.safetensors"
    known = blake2b(f"{weights} {weights.stat().st_mtime_ns}".encode(), digest_size=8).hexdigest()
    file = cache() / f"{known}-{dtype}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(folder, file, dtype)
    return file


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text())
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    add_sizes(writer, config)
    kind = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
    for name, tensor in tensors(folder).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        rotated = next((n for key, n in heads.items() if f"{key}.weight" in name), None)
        tensor = tensor if rotated is None else interleaved(tensor, rotated)
        if tensor.ndim > 1 and dtype == "bfloat16":
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


def add_sizes(writer: Any, config: dict[str, Any]) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def tensors(folder: Path) -> dict[str, Any]:
    """A folder's tensors in float32, by name."""
    import jax
    import numpy as np
    from safetensors import safe_open

    cpu = jax.devices("cpu")[0]
    with safe_open(folder / "model.safetensors", framework="flax") as file, jax.default_device(cpu):
        names = list(file.keys())
        return {name: np.asarray(file.get_tensor(name), np.float32) for name in names}


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of a rotated projection in the order of llama.cpp's Llama, which rotates neighbours, not
    halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.weight"
