"""Small packers of quantised checkpoints, written from the formats' papers: they share nothing with the
reader."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cases.families.golden import hub_config

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.layout import parameter_groups

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Parts = dict[str, np.ndarray]
# name, weight -> stored parts, the numbers they stand for
Packer = Callable[[str, np.ndarray], tuple[Parts, np.ndarray]]


def fp8(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.float8_e4m3fn)


def fp8_blocks(m: int, n: int, suffix: str = "_scale_inv") -> Packer:
    """As DeepSeek-V3's: a scale for each block of m rows and n columns, the last ones cut."""

    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        codes, scales = np.zeros_like(w), np.zeros((-(-w.shape[0] // m), -(-w.shape[1] // n)), np.float32)
        exact = np.zeros_like(w)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = np.s_[i * m : (i + 1) * m, j * n : (j + 1) * n]
                scales[i, j] = np.abs(w[block]).max() / 448
                codes[block] = fp8(w[block] / scales[i, j]).astype(np.float32)
                exact[block] = codes[block] * scales[i, j]
        return {name: fp8(codes), name + suffix: scales}, exact

    return pack


def fp8_scaled(suffix: str, by_row: bool) -> Packer:
    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        scale = np.abs(w).max(axis=1 if by_row else None, keepdims=by_row).astype(np.float32) / np.float32(
            448
        )
        codes = fp8(w / scale)
        return {name: codes, name + suffix: np.asarray(scale)}, codes.astype(np.float32) * scale

    return pack


def mxfp4(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
    """Weights [E,i,o] crosswise: for each output blocks of 32 inputs, two to a byte, and the exponent of each
    block."""
    rows = w.transpose(0, 2, 1).reshape(w.shape[0], w.shape[2], -1, 32)
    exponent = np.floor(np.log2(np.abs(rows).max(-1))) - 2
    scaled = rows / 2.0 ** exponent[..., None]
    index = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    exact = np.sign(scaled) * E2M1[index] * 2.0 ** exponent[..., None]
    nibble = (index + 8 * (scaled < 0)).astype(np.uint8)
    blocks = nibble[..., 0::2] + 16 * nibble[..., 1::2]
    exact = exact.reshape(w.shape[0], w.shape[2], -1).transpose(0, 2, 1).astype(np.float32)
    return {name + "_blocks": blocks, name + "_scales": (exponent + 127).astype(np.uint8)}, exact


def grouped(w: np.ndarray, bits: int, group: np.ndarray, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Integers [i,o], zeros and half-precision scales [groups,o] of a weight [o,i], and the numbers they
    stand for."""
    top, columns = 2**bits - 1, w.T
    zeros, scales = (np.zeros((group.max() + 1, len(w)), t) for t in (np.int64, np.float16))
    for g in range(len(zeros)):
        own = columns[group == g]
        low, high = np.minimum(own.min(0), 0), np.maximum(own.max(0), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[g] = (high - low) / top
        zeros[g] = (top + 1) // 2 if symmetric else np.clip(np.round(-low / scales[g]), 0, top)
    scale = scales.astype(np.float32)
    q = np.clip(np.round(columns / scale[group]) + zeros[group], 0, top).astype(np.int64)
    return q, zeros, scales, ((q - zeros[group]) * scale[group]).T.astype(np.float32)


def words(q: np.ndarray, bits: int, order: list[int]) -> np.ndarray:
    """Integers [n,columns], so many neighbouring columns in each int32; `order` says which of them comes
    first."""
    per = 32 // bits
    out = np.zeros((len(q), q.shape[1] // per), np.uint64)
    for place, column in enumerate(order):
        out |= q[:, column::per].astype(np.uint64) << np.uint64(bits * place)
    return out.astype(np.uint32).view(np.int32)


def awq(group: int) -> Packer:
    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        of = np.arange(w.shape[1]) // (w.shape[1] if group == -1 else group)
        q, zeros, scales, exact = grouped(w, 4, of, symmetric=False)
        stem, order = name.removesuffix("weight"), [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": words(q, 4, order), "qzeros": words(zeros, 4, order), "scales": scales}
        return {stem + key: value for key, value in parts.items()}, exact

    return pack


def gptq(group: int, bits: int = 4, symmetric: bool = True, ordered: bool = False, less: int = 1) -> Packer:
    """`ordered` shuffles the inputs among the groups, as desc_act does; zeros are stored `less` than they
    are."""

    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        of = np.arange(w.shape[1]) // (w.shape[1] if group == -1 else group)
        if ordered:
            of = np.random.default_rng(len(name)).permutation(of)
        q, zeros, scales, exact = grouped(w, bits, of, symmetric)
        stem, order = name.removesuffix("weight"), list(range(32 // bits))
        stored = (zeros - less) % 2**bits
        parts = {"qweight": words(q.T, bits, order).T, "qzeros": words(stored, bits, order), "scales": scales}
        parts |= {"g_idx": of.astype(np.int32)} if ordered else {}
        return {stem + key: np.ascontiguousarray(value) for key, value in parts.items()}, exact

    return pack


def in_order_of_bits(integers: np.ndarray, bits: int) -> np.ndarray:
    """Words of each row's integers, the last one filled with zeros."""
    cut = -integers.shape[1] % (32 // bits)
    return words(np.pad(integers, ((0, 0), (0, cut))), bits, list(range(32 // bits)))


def compressed_words(group: int, bits: int = 4, symmetric: bool = True, ordered: bool = False) -> Packer:
    """As llm-compressor's W4A16 and W8A16: zeros are packed along the outputs; `ordered` as for `gptq`."""

    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        of = np.arange(w.shape[1]) // (w.shape[1] if group == -1 else group)
        if ordered:
            of = np.random.default_rng(len(name)).permutation(of)
        q, zeros, scales, exact = grouped(w, bits, of, symmetric)
        parts = {
            "_packed": in_order_of_bits(q.T, bits), "_scale": scales.T, "_shape": np.array(w.shape, np.int64)
        }  # fmt: skip
        parts |= {} if symmetric else {"_zero_point": in_order_of_bits(zeros, bits).T}
        parts |= {"_g_idx": of.astype(np.int32)} if ordered else {}
        return {name + key: np.ascontiguousarray(value) for key, value in parts.items()}, exact

    return pack


def compressed_bytes(group: int, symmetric: bool = True) -> Packer:
    """As llm-compressor's W8A8: integers in bytes of their own."""

    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        of = np.arange(w.shape[1]) // (w.shape[1] if group == -1 else group)
        q, zeros, scales, exact = grouped(w, 8, of, symmetric)
        parts = {"": (q.T - 128).astype(np.int8), "_scale": scales.T}
        parts |= {} if symmetric else {"_zero_point": (zeros.T - 128).astype(np.int8)}
        return {name + key: np.ascontiguousarray(value) for key, value in parts.items()}, exact

    return pack


def nvfp4(suffix: str) -> Packer:
    """Pairs of four-bit floats, an FP8 scale for each 16, and a global scale.

    llm-compressor's `_packed` divides by it, and ModelOpt multiplies.
    """

    def pack(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
        blocks = w.reshape(len(w), -1, 16)
        factor = np.abs(w).max() / np.float32(6 * 448)
        divisor = np.float32(1) / factor
        scales = fp8(np.abs(blocks).max(-1) / 6 / factor)
        wide = scales.astype(np.float32)
        wide = wide / divisor if suffix else wide * factor
        scaled = (blocks / wide[..., None]).reshape(w.shape)
        index = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
        nibble = (index + 8 * (scaled < 0)).astype(np.uint8)
        exact = np.sign(scaled) * E2M1[index] * np.repeat(wide, 16, axis=1)
        parts = {suffix: nibble[:, 0::2] + 16 * nibble[:, 1::2], "_scale": scales}
        parts |= {"_global_scale": divisor[None]} if suffix else {"_scale_2": np.array(factor)}
        return {name + key: value for key, value in parts.items()}, exact.astype(np.float32)

    return pack


def module_wise(name: str, w: np.ndarray) -> tuple[Parts, np.ndarray]:
    """As GPTQModel's `dynamic`: bits and groups of some modules, and others that stay floats."""
    if "o_proj" in name:
        return {name: w}, w
    group, bits = (8, 8) if "down_proj" in name else (48, 2) if "up_proj" in name else (16, 4)
    return gptq(group, bits, symmetric=False, ordered=True)(name, w)


CODES = {
    "float8_e4m3fn": "F8_E4M3", "int8": "I8", "int32": "I32", "int64": "I64", "uint8": "U8", "float32": "F32",
    "float16": "F16",
}  # fmt: skip


def write(folder: Path, config: Mapping[str, Any], tensors: Parts) -> Path:
    """A folder with one safetensors file, header and all."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": CODES[str(array.dtype)],
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.writelines(array.tobytes() for array in tensors.values())
    return folder


def quantise(
    source: tuple[dict[str, Any], Parts],
    folder: Path,
    method: Mapping[str, Any],
    pack: Packer,
    chosen: Callable[[str], bool],
) -> tuple[Path, Path]:
    """Two folders: the quantised model, and the same numbers in float32."""
    config, tensors = source
    stored, exact = {}, {}
    for name, w in tensors.items():
        parts, numbers = pack(name, w) if chosen(name) else ({name: w}, w)
        stored |= parts
        exact[name] = numbers
    folder.mkdir()
    return (
        write(folder / "quantised", config | {"quantization_config": dict(method)}, stored),
        write(folder / "exact", config, exact),
    )


def llama_folder() -> tuple[dict[str, Any], Parts]:
    """A small Llama with odd head counts and separate output matrix, random."""
    D, H, N, K, F, V = 96, 16, 5, 1, 80, 64
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        projections = {"q": (N * H, D), "k": (K * H, D), "v": (K * H, D), "o": (D, N * H)}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (D, F)}
        shapes |= {f"{layer}{name}layernorm.weight": (D,) for name in ("input_", "post_attention_")}
    config = {
        "model_type": "llama", "vocab_size": V, "hidden_size": D, "intermediate_size": F,
        "num_hidden_layers": 2, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H,
        "max_position_embeddings": 64,
    }  # fmt: skip
    return config, {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def projection(name: str) -> bool:
    return "_proj" in name and "bias" not in name


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4}
LLAMA_CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "fp8 blocks": (FP8 | {"weight_block_size": [32, 64]}, fp8_blocks(32, 64)),
    "fp8 large blocks": (FP8 | {"weight_block_size": [128, 128]}, fp8_blocks(128, 128)),
    "fp8 tensor": (FP8, fp8_scaled("_scale", False)),
    "fp8 tensor inverse": (FP8 | {"weight_block_size": None}, fp8_scaled("_scale_inv", False)),
    "fp8 rows": ({"quant_method": "fbgemm_fp8"}, fp8_scaled("_scale", True)),
    "compressed": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        fp8_scaled("_scale", True),
    ),
    "awq": (AWQ | {"group_size": 16}, awq(16)),
    "awq whole": (AWQ | {"group_size": -1}, awq(-1)),
    "gptq": (GPTQ | {"group_size": 16, "sym": True, "desc_act": False}, gptq(16)),
    "gptq cut group": (GPTQ | {"group_size": 64}, gptq(64)),
    "gptq asymmetric": (GPTQ | {"group_size": 16, "sym": False}, gptq(16, symmetric=False)),
    "gptq ordered": (GPTQ | {"group_size": 16, "desc_act": True}, gptq(16, symmetric=False, ordered=True)),
    "gptq v2": (GPTQ | {"group_size": 16, "checkpoint_format": "gptq_v2"}, gptq(16, symmetric=False, less=0)),
    "gptq 8 bits": (GPTQ | {"group_size": -1, "bits": 8}, gptq(-1, bits=8)),
}


LLAMA_CASES |= {
    "gptq format v2": (GPTQ | {"group_size": 16, "format": "gptq_v2"}, gptq(16, symmetric=False, less=0)),
    "gptq module-wise": (
        GPTQ | {"group_size": 16, "dynamic": {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8}}}, module_wise
    ),
    "compressed blocks": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"strategy": "block", "block_structure": [32, 48]},
            }},
        },
        fp8_blocks(32, 48, "_scale"),
    ),
}  # fmt: skip


def compressed(format_name: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors", "format": format_name,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}},
    }  # fmt: skip


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
LLAMA_CASES |= {
    "modelopt": (MODELOPT, nvfp4("")),
    "modelopt fp8": (MODELOPT | {"quant_algo": "FP8"}, fp8_scaled("_scale", False)),
    "modelopt mixed": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": {"quant_algo": "FP8"}}},
        lambda name, w: (nvfp4("") if "mlp" in name else fp8_scaled("_scale", True))(name, w),
    ),
    "bytes": (compressed("int-quantized", strategy="channel"), compressed_bytes(-1)),
    "bytes with zeros": (
        compressed("naive-quantized", strategy="channel", symmetric=False), compressed_bytes(-1, False)
    ),
    "bytes in groups": (
        compressed("int-quantized", strategy="group", group_size=16, symmetric=False),
        compressed_bytes(16, False),
    ),
    "words": (compressed("pack-quantized", num_bits=4, group_size=16), compressed_words(16)),
    "words with zeros": (
        compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False),
        compressed_words(16, symmetric=False),
    ),
    "words ordered": (
        compressed("pack-quantized", num_bits=4, group_size=16, symmetric=False, actorder="group"),
        compressed_words(16, symmetric=False, ordered=True),
    ),
    "mixed": (
        {
            "quant_method": "compressed-tensors", "format": "mixed-precision",
            "config_groups": {
                "a": {"format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 16}},
                "b": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
                "c": {"format": "int-quantized", "weights": {"num_bits": 8, "symmetric": False}},
            },
        },
        lambda name, w: (
            fp8_scaled("_scale", True) if "mlp" in name
            else compressed_bytes(-1, False) if "o_proj" in name else compressed_words(16)
        )(name, w),
    ),
    "fp4": (compressed("nvfp4-pack-quantized", num_bits=4, group_size=16), nvfp4("_packed")),
    "words of 8 bits": (
        compressed("pack-quantized", strategy="channel", group_size=-1, symmetric=False),
        compressed_words(-1, 8, symmetric=False),
    ),
}  # fmt: skip


def experts(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


def random_folder(case: str, sizes: Mapping[str, int]) -> tuple[dict[str, Any], Parts]:
    """A family's case with some sizes of its own, random."""
    config = hub_config(case) | dict(sizes)
    family, rng = FAMILIES[config["model_type"]], np.random.default_rng(1)
    shapes = {
        name: group.shape
        for group in parameter_groups(family.names, family.parse_config(config))
        for name in group.names
    }
    return config, {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
