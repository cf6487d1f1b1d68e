"""Quantised checkpoints: the supported forms of `quantization_config`, and the tensors that make up one
weight.

Each weight becomes a `TensorSource` under its name without quantisation. Formats are FP8 with a scale per
tensor, row or block (DeepSeek-V3, arXiv 2412.19437), MXFP4 (OCP Microscaling, arXiv 2310.10537; gpt-oss), AWQ
(arXiv 2306.00978) and GPTQ (arXiv 2210.17323). Scales of activations and of the cache are ignored: neither is
quantised by a file's scales here.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...refusals import quote
from ..families.fields import allow_only, flag, integer, present_name, value
from ..tensors import CheckpointError, Tensor, TensorSource
from .formats import ALL_INPUTS, GPTQ_BITS, BlockScaled, LastRead, Mxfp4, PackedWeight, Packing

QUANT_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "awq", "gptq")
# scales of activations and of the cache
UNUSED_SCALES = re.compile(
    r".*\.(activation|input|(prob_)?output|prob|q|k|v|kv)_(scale(_inv|_ub)?|zero_point)"
)


def check_quantization(raw: Mapping[str, Any]) -> None:
    """Raise ValueError with the field and its value for a `quantization_config` that cannot be read."""
    config = raw.get("quantization_config")
    if config is None:
        return
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in QUANT_METHODS:
        raise ValueError(
            f"quantization_config: quant_method is {quote(method)}, which is not supported: "
            f"expected one of {', '.join(QUANT_METHODS)}"
        )
    try:
        check_quant_fields(config)
    except ValueError as e:
        raise ValueError(f"quantization_config: {e}") from e


def check_quant_fields(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an unsupported value in a `quantization_config` of a known method."""
    method = config["quant_method"]
    if method == "compressed-tensors":
        allow_only(config, "format", "float-quantized")
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


def weight_block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
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
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError(f"config_groups is {quote(groups)}, expected an object of objects")
    weights = (group.get("weights") for group in groups.values())
    stated = [("block_structure", w.get("block_structure")) for w in weights if isinstance(w, Mapping)]
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
    suffixes = ("_scale_inv", "_scale")
    return join_parts(
        tensors, ".weight", suffixes, ".weight", partial(BlockScaled.from_parts, weight_block_size(config))
    )


def join_parts(
    tensors: Mapping[str, Tensor],
    main_suffix: str,
    part_suffixes: tuple[str, ...],
    new_suffix: str,
    make_source: Callable[[str, Tensor, dict[str, Tensor]], TensorSource],
) -> dict[str, TensorSource]:
    """Replace each tensor whose name ends in `main_suffix`, with its parts, by one TensorSource.

    part_suffixes: endings of the parts' names.
    new_suffix: replaces the ending `main_suffix` in the name.
    make_source: makes the source of the new name, the tensor, and its parts by ending.
    """
    sources: dict[str, TensorSource] = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(main_suffix):
            continue
        stem = name if main_suffix == new_suffix else name.removesuffix(main_suffix)
        parts = {part: sources.pop(stem + part) for part in part_suffixes if stem + part in tensors}
        if main_suffix == new_suffix and tensor.code != "F8_E4M3":
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
