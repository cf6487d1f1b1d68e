"""Checkpoints whose weights are stored in eight or four bits: what their `config.json` may say, and which
tensors are one weight.

Each format becomes a `TensorSource` under the name that the weight has where it is not quantised: FP8 with a
scale per tensor, row or block (DeepSeek-V3, arXiv 2412.19437), MXFP4 (OCP Microscaling, arXiv 2310.10537;
gpt-oss), AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323). Activations are never quantised here, so what a
file says of them changes nothing.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...refusals import shown
from ..families.fields import flag, integer, only, value
from ..tensors import CheckpointError, Tensor, TensorSource
from .formats import ALL_INPUTS, BlockScaled, LastRead, Mxfp4, PackedWeight, Packing

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "awq", "gptq")


def check_config(raw: Mapping[str, Any]) -> None:
    """Raise ValueError with the field and its value for a `quantization_config` that cannot be read."""
    config = raw.get("quantization_config")
    if config is None:
        return
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in METHODS:
        raise ValueError(
            f"quantization_config: quant_method is {shown(method)}, which is not supported: "
            f"expected one of {', '.join(METHODS)}"
        )
    try:
        check_method(config)
    except ValueError as e:
        raise ValueError(f"quantization_config: {e}") from e


def check_method(config: Mapping[str, Any]) -> None:
    method = config["quant_method"]
    if method == "fp8":
        block_size(config)
    elif method == "compressed-tensors":
        only(config, "format", "float-quantized")
    elif method == "awq":
        only({"bits": integer(config, "bits", 4)}, "bits", 4)
        only(config, "version", "gemm", "GEMM")
        only(config, "format", "gemm")
        flag(config, "zero_point", True)
        only(config, "zero_point", True)
    elif method == "gptq":
        only({"bits": integer(config, "bits", 4)}, "bits", 2, 4, 8)
        only(config, "checkpoint_format", "gptq", "gptq_v2")
    if method in ("awq", "gptq") and config.get("group_size") != ALL_INPUTS:
        integer(config, "group_size", 128)


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where `weight_block_size` is absent or null."""
    found = config.get("weight_block_size")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise ValueError(f"weight_block_size is {shown(found)}, expected two positive integers")
    return found[0], found[1]


def sources(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, TensorSource]:
    """The tensors of a folder by name, with one TensorSource in place of each quantised weight's parts.

    `raw` are the fields of its `config.json`. Raises CheckpointError where parts are missing or do not fit
    each other.
    """
    config = raw.get("quantization_config")
    if config is None:
        return dict(tensors)
    method, held = config["quant_method"], LastRead()
    if method == "mxfp4":
        return joined(tensors, "_blocks", ("_scales",), "", partial(Mxfp4.joined, held))
    if method in ("awq", "gptq"):
        bits, parts = value(config, "bits", 4), (".qzeros", ".scales", ".g_idx")
        # the first format stored zeros less one
        shift = int(method == "gptq" and config.get("checkpoint_format") != "gptq_v2")
        packing = Packing(bits, method == "awq", shift, value(config, "group_size", 128))
        return joined(tensors, ".qweight", parts, ".weight", partial(PackedWeight.joined, held, packing))
    parts = ("_scale_inv", "_scale")
    unused = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")
    tensors = {name: t for name, t in tensors.items() if not name.endswith(unused)}
    return joined(tensors, ".weight", parts, ".weight", partial(BlockScaled.joined, block_size(config)))


def joined(
    tensors: Mapping[str, Tensor],
    main: str,
    parts: tuple[str, ...],
    becomes: str,
    make: Callable[[str, Tensor, dict[str, Tensor]], TensorSource],
) -> dict[str, TensorSource]:
    """Each tensor whose name ends in `main` with those that end in its `parts`, as one TensorSource."""
    found: dict[str, TensorSource] = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(main):
            continue
        stem = name if main == becomes else name.removesuffix(main)
        beside = {part: found.pop(stem + part) for part in parts if stem + part in tensors}
        if main == becomes and tensor.code != "F8_E4M3":
            found |= {stem + part: t for part, t in beside.items()}
            continue
        del found[name]
        target = name.removesuffix(main) + becomes
        if target in found:
            raise CheckpointError(
                f"{tensor.file}: tensors {target!r} and {name!r} are one weight, expected one of them"
            )
        found[target] = make(target, tensor, beside)  # type: ignore[arg-type]
    return found
