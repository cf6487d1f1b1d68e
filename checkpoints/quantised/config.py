"""Quantised checkpoints: the supported forms of `quantization_config`, and the tensors that make up one
weight.

Each weight becomes a `TensorSource` under its name without quantisation. Formats are FP8 with a scale per
tensor, row or block (DeepSeek-V3, arXiv 2412.19437), integers of compressed-tensors, NVFP4 of both
compressed-tensors and ModelOpt, MXFP4 (OCP Microscaling, arXiv 2310.10537; gpt-oss), AWQ (arXiv 2306.00978)
and GPTQ (arXiv 2210.17323). Scales of activations and of the cache are ignored: neither is
quantised by a file's scales here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...refusals import quote
from ..families.fields import allow_only, flag, integer, present_name, value
from ..tensors import CheckpointError, Tensor, TensorSource
from .block_scaled import PACKED_BITS, Block, BlockScaled, WeightArgs
from .formats import ALL_INPUTS, GPTQ_BITS, Mxfp4, PackedWeight, Packing
from .known_fields import READ_FIELDS, check_known_fields, config_groups
from .parts import LastRead

# scales of activations and of the cache
UNUSED_SCALES = re.compile(
    r".*\.(activation|input|(prob_)?output|prob|q|k|v|kv)_((global_)?scale(_inv|_ub)?|zero_point)"
)
# of compressed-tensors
COMPRESSED_FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
NVFP4_BLOCK = 16
PACKED_PARTS = ("_scale", "_shape", "_zero_point", "_g_idx", "_global_scale")


def check_quantization(raw: Mapping[str, Any]) -> None:
    """Raise ValueError with the field and its value for a `quantization_config` that cannot be read."""
    config = raw.get("quantization_config")
    if config is None:
        return
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str) or method not in READ_FIELDS:
        raise ValueError(
            f"quantization_config: quant_method is {quote(method)}, which is not supported: "
            f"expected one of {', '.join(READ_FIELDS)}"
        )
    try:
        check_quant_fields(config)
    except ValueError as e:
        raise ValueError(f"quantization_config: {e}") from e


def check_quant_fields(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an unsupported value in a `quantization_config` of a known method."""
    check_known_fields(config)
    method = config["quant_method"]
    if method == "compressed-tensors":
        check_weight_formats(config)
    elif method == "modelopt":
        check_weight_formats(config)
        check_algorithms(config)
    elif method == "awq":
        allow_only({"bits": integer(config, "bits", 4)}, "bits", 4)
        allow_only(config, "version", "gemm", "GEMM")
        allow_only(config, present_name(config, "checkpoint_format", "format"), "gemm")
        flag(config, "zero_point", True)
        allow_only(config, "zero_point", True)
    elif method == "gptq":
        allow_only({"bits": integer(config, "bits", 4)}, "bits", *GPTQ_BITS)
        allow_only(config, present_name(config, "checkpoint_format", "format"), "gptq", "gptq_v2")
        allow_only(config, "is_marlin_format", False)
    weight_block_size(config)
    if method in ("awq", "gptq") and config.get("group_size") != ALL_INPUTS:
        integer(config, "group_size", 128)


def check_weight_formats(config: Mapping[str, Any]) -> None:
    """Raise ValueError for weights of `config_groups` that cannot be read."""
    allow_only(config, "format", *COMPRESSED_FORMATS, "mixed-precision")
    for _, group in config_groups(config):
        allow_only(group, "format", *COMPRESSED_FORMATS)
        weights = group.get("weights") or {}
        allow_only(weights, "type", "int", "float")
        flag(weights, "symmetric", True)
        if weights.get("group_size") != ALL_INPUTS:
            integer(weights, "group_size", None)
        bits = integer(weights, "num_bits", 8)
        if value(group, "format", config.get("format")) == "pack-quantized":
            allow_only({"num_bits": bits}, "num_bits", *PACKED_BITS)


def check_algorithms(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an algorithm of ModelOpt, or of one of its layers, that is not supported."""
    layers = config.get("quantized_layers") or {}
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise ValueError(f"quantized_layers is {quote(layers)}, expected an object of objects")
    allow_only(config, "quant_algo", *MODELOPT_ALGORITHMS, "MIXED_PRECISION")
    integer(config, "group_size", NVFP4_BLOCK)
    for layer in layers.values():
        allow_only(layer, "quant_algo", *MODELOPT_ALGORITHMS)


def weight_block_size(config: Mapping[str, Any]) -> Block | None:
    """Return how many rows and columns share a scale, or None if no block is stated.

    Raises ValueError if several different blocks are stated.
    """
    blocks = sorted(set(list_block_sizes(config)))
    if len(blocks) > 1:
        raise ValueError(f"block_structure is {' and '.join(map(str, blocks))}, expected one of all groups")
    return blocks[0] if blocks else None


def list_block_sizes(config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield each block that is stated, as its rows and columns.

    It is `weight_block_size`, or in compressed-tensors a field of the weights of each of the `config_groups`.
    """
    weights = (group.get("weights") or {} for _, group in config_groups(config))
    stated = [("block_structure", w.get("block_structure")) for w in weights]
    for name, block in [("weight_block_size", config.get("weight_block_size")), *stated]:
        if block is None:
            continue
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ValueError(f"{name} is {quote(block)}, expected two positive integers")
        yield block[0], block[1]


def tensor_sources(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, TensorSource]:
    """Return a folder's tensors by name, with one TensorSource in place of the tensors of a quantised weight.

    `raw` are the fields of its `config.json`. Raises CheckpointError if tensors are missing or do not fit
    each other.
    """
    config = raw.get("quantization_config")
    if config is None:
        return dict(tensors)
    method, last_read = config["quant_method"], LastRead()
    tensors = {name: tensor for name, tensor in tensors.items() if not UNUSED_SCALES.fullmatch(name)}
    if method == "mxfp4":
        return join_parts(tensors, "_blocks", ("_scales",), "", partial(Mxfp4.from_parts, last_read))
    if method in ("awq", "gptq"):
        bits, suffixes = value(config, "bits", 4), (".qzeros", ".scales", ".g_idx")
        form = config.get(present_name(config, "checkpoint_format", "format"))
        # GPTQ's first format stores zeros less one
        shift = int(method == "gptq" and form != "gptq_v2")
        packing = Packing(bits, method == "awq", shift, value(config, "group_size", 128))
        return join_parts(
            tensors, ".qweight", suffixes, ".weight", partial(PackedWeight.from_parts, last_read, packing)
        )
    make_source, suffixes = (
        partial(BlockScaled.from_parts, read_weight_args(config)),
        ("_scale_inv", "_scale"),
    )
    if method == "modelopt":
        suffixes = ("_scale", "_scale_2")
        return join_parts(tensors, ".weight", suffixes, ".weight", make_source, ("F8_E4M3", "U8"))
    if method != "compressed-tensors":
        return join_parts(tensors, ".weight", suffixes, ".weight", make_source)
    sources = join_parts(tensors, "_packed", PACKED_PARTS, "", make_source)
    suffixes = *suffixes, "_zero_point"
    return join_parts(sources, ".weight", suffixes, ".weight", make_source, ("F8_E4M3", "I8"))


def read_weight_args(config: Mapping[str, Any]) -> WeightArgs:
    """Return what a `quantization_config` says of the weights."""
    block = weight_block_size(config)
    weights = [group["weights"] for _, group in config_groups(config) if group.get("weights")]
    sizes = {w.get("group_size") for w in weights} - {None, ALL_INPUTS}
    if config["quant_method"] == "modelopt":
        sizes |= {value(config, "group_size", NVFP4_BLOCK)}
    blocks = [(1, size) for size in sorted(sizes)] + ([block] if block else [])
    bits = {value(w, "num_bits", 8) for w in weights}.intersection(PACKED_BITS)
    symmetric = {value(w, "symmetric", True) for w in weights if w.get("type") != "float"}
    return WeightArgs(tuple(blocks), tuple(sorted(bits)) or PACKED_BITS, symmetric == {False})


def join_parts(
    tensors: Mapping[str, Any],
    main_suffix: str,
    part_suffixes: tuple[str, ...],
    new_suffix: str,
    make_source: Callable[[str, Tensor, dict[str, Tensor]], TensorSource],
    codes: tuple[str, ...] = ("F8_E4M3",),
) -> dict[str, TensorSource]:
    """Replace each tensor whose name ends in `main_suffix`, with its parts, by one TensorSource.

    part_suffixes: endings of the parts' names.
    new_suffix: replaces the ending `main_suffix` in the name.
    make_source: makes the source of the new name, the tensor, and its parts by ending.
    codes: dtypes of a quantised tensor, if it keeps its name.
    """
    sources: dict[str, TensorSource] = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(main_suffix):
            continue
        stem = name if main_suffix == new_suffix else name.removesuffix(main_suffix)
        parts = {part: sources.pop(stem + part) for part in part_suffixes if stem + part in tensors}
        if main_suffix == new_suffix and tensor.code not in codes:
            sources |= {stem + part: t for part, t in parts.items()}
            continue
        del sources[name]
        target = name.removesuffix(main_suffix) + new_suffix
        if target in sources:
            raise CheckpointError(
                f"{tensor.file}: tensors {target!r} and {name!r} are one weight, expected one of them"
            )
        sources[target] = make_source(target, tensor, parts)  # type: ignore[arg-type]
    return sources
