"""Trees of parameters with weights in panels for duetto's own CPU kernels: which weights these are, and the
way back."""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ....cpu_kernels import library
from ...transformer import Decoder
from ...tree import map_by_path
from ..compression.compress import CONTRACTED_AXES, encode_weight, place_replacement
from ..input_quantised import InputQuantised
from ..nibbles import has_group_scales
from ..quant import Quantised
from ..schemes import SCHEMES
from ..transposed import TRANSPOSED_NAMES, Transposed, is_matrix_on_cpu, transpose_weight
from .kernel_norm import with_kernel_norms
from .panels import PANEL_DTYPES, Packed, apply_or_eval_shape, pack_codes, pack_experts, pack_matrix

T = TypeVar("T")
EXPERT_NAMES = ("gate", "up", "down")  # fields of experts
# Numbers of axes of the weights that kernels multiply. "gate" is a feed-forward layer's, or attention's.
AXIS_COUNTS = {
    **{name: (-CONTRACTED_AXES[name][0],) for name in TRANSPOSED_NAMES},
    "gate": (2, 3),
    "head": (2,),
    "output_gate": (1,),
    "head_gate": (2,),
    "project": (3,),
}
LONGEST_GROUP = 1 << 14  # inputs of a group of 4-bit codes that kernels multiply by codes: of products.h
QUANTISED_ROWS_AT_ONCE = 8192  # rows of an embedding that are quantised at once: their floats take memory


def pack_params(params: T, isa: str, donate: bool = False, tied_head: str | None = None) -> T:
    """Pack a CPU's projections, gates, experts and output matrix as `Packed`, for an instruction set.

    Takes parameters or ShapeDtypeStructs. If the embedding is the output matrix too, a copy is packed, in the
    scheme `tied_head` or in its dtype. Unchanged are: latents' projections, other records, weights of other
    dtypes and schemes, and those on several devices. If a weight is packed, kernels compute norms too
    (`with_kernel_norms`). With `donate` each weight is deleted when its copy is ready, except embeddings.
    """
    target = library.ffi_target_name("product", isa)

    def pack_leaf(path: str, weight: Any) -> Any:
        *parents, name = path.split(".")
        is_expert = "experts" in parents
        if not can_pack(name, weight, is_expert):
            return weight
        return place_replacement(weight, pack_weight(name, weight, target, is_expert), donate)

    result = map_by_path(params, (Packed, Transposed, Quantised, InputQuantised), pack_leaf)
    if isinstance(result, Decoder) and result.head is None and can_pack("head", result.embed):
        result = replace(result, head=pack_tied_head(result.embed, target, tied_head))
    if result is params:
        return params
    return with_kernel_norms(result, library.ffi_target_name("norm", isa))  # type: ignore[return-value]


def pack_weight(name: str, weight: Any, target: str, is_expert: bool = False) -> Packed:
    """Pack one weight by the name of its field."""
    if is_expert:
        return pack_experts(weight, target)
    if name == "head":
        return pack_head(weight, target)
    if isinstance(weight, InputQuantised):
        return pack_codes(weight.weight, len(CONTRACTED_AXES[name]), target, weight.activations)
    if isinstance(weight, Quantised):
        return pack_codes(weight, len(CONTRACTED_AXES[name]), target)
    ready = weight if isinstance(weight, Transposed) else transpose_weight(weight, 2 if name == "o" else 1)
    return pack_matrix(ready.array, ready.inputs, ready.outputs, target)


def pack_head(matrix: Any, target: str) -> Packed:
    """Pack an output matrix [outputs, inputs]."""
    outputs, inputs = matrix.shape
    return pack_matrix(matrix, (inputs,), (outputs,), target, is_head=True)


def pack_tied_head(embed: Any, target: str, scheme: str | None) -> Packed:
    """Pack a copy of the embedding as output matrix."""
    if scheme is None:
        return replace(pack_head(embed, target), is_tied=True)
    return replace(
        pack_codes(apply_or_eval_shape(partial(quantise_embedding, scheme=scheme), embed), 1, target),
        is_tied=True,
    )


def quantise_embedding(embed: Float[Array, "V D"], scheme: str) -> Quantised:
    """Quantise the embedding as a weight [D,V]."""
    parts = [
        encode_weight(embed[i : i + QUANTISED_ROWS_AT_ONCE].T, (-2,), scheme)
        for i in range(0, len(embed), QUANTISED_ROWS_AT_ONCE)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *parts)


def can_pack(name: str, weight: Any, is_expert: bool = False) -> bool:
    """Return True for a projection, a gate, experts' matrices or an output matrix of a dtype and device that
    have kernels."""
    if isinstance(weight, Transposed):
        return weight.array.dtype in PANEL_DTYPES
    if is_expert and name not in EXPERT_NAMES:
        return False
    if isinstance(weight, InputQuantised):
        return can_pack(name, weight.weight, is_expert) and can_pack_coded_rows(name, weight)
    if isinstance(weight, Quantised):
        return name in TRANSPOSED_NAMES and can_pack_codes(weight, len(CONTRACTED_AXES[name]), is_expert)
    counts = (3,) if is_expert else AXIS_COUNTS.get(name, ())
    return any(is_matrix_on_cpu(weight, count) for count in counts) and weight.dtype in PANEL_DTYPES


def can_pack_codes(quantised: Quantised, inputs: int, is_expert: bool) -> bool:
    """Return True for 8-bit codes with scales of outputs, and for 4-bit codes with scales of groups of
    inputs."""
    shape, scales = quantised.shape[is_expert:], quantised.scales.shape[is_expert:]
    scheme = SCHEMES[quantised.scheme]
    if quantised.zeros is not None or not scheme.has_cpu_kernel:
        return False
    if not is_matrix_on_cpu(quantised.values, quantised.values.ndim):
        return False
    if is_expert and (len(shape) != 2 or len(quantised.scales) != len(quantised.values)):
        return False
    if scheme.codes_per_byte == 1:
        return set(scales[:inputs]) == {1}
    return (
        quantised.packed % len(quantised.shape) == inputs + is_expert - 1
        and has_group_scales(shape, scales, inputs)
        and prod(shape[:inputs]) // prod(scales[:inputs]) % 2 == 0
    )


def can_pack_coded_rows(name: str, weight: InputQuantised) -> bool:
    """Return True for activations and groups of inputs whose codes are multiplied by kernels."""
    group = weight.weight.group_size(len(CONTRACTED_AXES[name]))
    is_narrow = SCHEMES[weight.weight.scheme].codes_per_byte > 1
    return weight.activations == "int8" and not (is_narrow and (group % 8 or group > LONGEST_GROUP))


def kernel_isa(params: Any) -> str | None:
    """Return the instruction set of the kernels that multiply parameters, or None."""
    target = kernel_ffi_target(params)
    return None if target is None else library.target_isa(target)


def kernel_ffi_target(params: Any) -> str | None:
    """Return the name for XLA of the kernels that multiply parameters, or None."""
    nodes = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed))
    return next((x.target for x in nodes if isinstance(x, Packed)), None)
