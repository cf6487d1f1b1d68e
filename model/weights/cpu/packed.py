"""Trees of parameters with weights that lie as duetto's own CPU kernels read them: which they are, and the
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
from ...tree import holds, unwrapped
from ..compress import CONTRACTED, encode, replaced
from ..nibbles import grouped
from ..quant import Quantised, Scheme
from ..transposed import NAMES, Transposed, is_matrix_on_cpu, transpose
from .kernel_norm import with_kernel_norms, without_kernel_norms
from .panels import OUTPUTS, Packed, applied, pack_codes, pack_experts, pack_matrix

T = TypeVar("T")
EXPERTS = ("gate", "up", "down")  # below ".experts."
ROWS_AT_ONCE = 8192  # of an embedding, when it is quantised: their floats take memory


def packed(params: T, isa: str, donate: bool = False, tied_head: Scheme | None = None) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, with a CPU's projections, experts and output matrix as
    `Packed`, for an instruction set; an output matrix that is the embedding too is a copy, in the scheme
    `tied_head` or in its dtype.

    Left as they are: latents' projections, other records, weights of other dtypes and schemes, and those that
    lie on several devices. If a weight is packed, kernels compute norms too (`with_kernel_norms`). With
    `donate` each weight is deleted when its copy is ready, but no embedding.
    """
    target = library.target("product", isa)

    def leaf(key: Any, weight: Any) -> Any:
        path = jax.tree_util.keystr(key, simple=True, separator=".").split(".")
        name, is_expert = path[-1], "experts" in path[:-1]
        if not can_be_packed(name, weight, is_expert):
            return weight
        done = pack(name, weight, target, is_expert)
        return done if isinstance(done.array, jax.ShapeDtypeStruct) else replaced(weight, done, donate)

    found = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_record)
    if isinstance(found, Decoder) and found.head is None and can_be_packed("head", found.embed):
        found = replace(found, head=pack_tied(found.embed, target, tied_head))
    if not is_packed(found):
        return params
    return with_kernel_norms(found, library.target("norm", isa))  # type: ignore[return-value]


def pack(name: str, weight: Any, target: str, is_expert: bool = False) -> Packed:
    """A weight by its name."""
    if is_expert:
        return pack_experts(weight, target)
    if name == "head":
        return pack_head(weight, target)
    if isinstance(weight, Quantised):
        return pack_codes(weight, len(CONTRACTED[name]), target)
    ready = weight if isinstance(weight, Transposed) else transpose(weight, len(CONTRACTED[name]))
    return pack_matrix(ready.array, ready.inputs, ready.outputs, target)


def pack_head(matrix: Any, target: str) -> Packed:
    outputs, inputs = matrix.shape
    return pack_matrix(matrix, (inputs,), (outputs,), target, is_head=True)


def pack_tied(embed: Any, target: str, scheme: Scheme | None) -> Packed:
    """A copy of the embedding as output matrix."""
    if scheme is None:
        return replace(pack_head(embed, target), is_tied=True)
    return replace(pack_codes(applied(partial(as_codes, scheme=scheme), embed), 1, target), is_tied=True)


def as_codes(embed: Float[Array, "V D"], scheme: Scheme) -> Quantised:
    """The embedding as a weight [D,V] in codes."""
    parts = [encode(embed[i : i + ROWS_AT_ONCE].T, (-2,), scheme) for i in range(0, len(embed), ROWS_AT_ONCE)]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *parts)


def can_be_packed(name: str, weight: Any, is_expert: bool = False) -> bool:
    """True for a projection, experts' matrices or an output matrix, of a dtype and on a device that kernels
    are for."""
    if isinstance(weight, Transposed):
        return weight.array.dtype in OUTPUTS
    if is_expert and name not in EXPERTS:
        return False
    if isinstance(weight, Quantised):
        return name in NAMES and can_pack_codes(weight, len(CONTRACTED[name]), is_expert)
    axes = 2 if name == "head" else is_expert - CONTRACTED[name][0] if name in NAMES else 0
    return is_matrix_on_cpu(weight, axes) and weight.dtype in OUTPUTS


def can_pack_codes(weight: Quantised, inputs: int, is_expert: bool) -> bool:
    """True for 8-bit codes with scales of outputs, and for 4-bit codes with scales of groups of inputs."""
    shape, scales = weight.shape[is_expert:], weight.scales.shape[is_expert:]
    if weight.zeros is not None or not is_matrix_on_cpu(weight.values, weight.values.ndim):
        return False
    if is_expert and (len(shape) != 2 or len(weight.scales) != len(weight.values)):
        return False
    if weight.scheme == "int8":
        return set(scales[:inputs]) == {1}
    is_paired = weight.scheme == "int4" and weight.packed % len(weight.shape) == inputs + is_expert - 1
    return (
        is_paired
        and grouped(shape, scales, inputs)
        and prod(shape[:inputs]) // prod(scales[:inputs]) % 2 == 0
    )


def unpacked(params: T) -> T:
    """The tree with arrays in place of `Packed`, which are copied, and without the embedding's copy; itself
    where it has none."""
    if isinstance(params, Decoder) and isinstance(params.head, Packed) and params.head.is_tied:
        params = replace(params, head=None)
    return without_kernel_norms(unwrapped(params, Packed, lambda x: x.whole))


def packed_as(served: Any, params: T) -> T:
    """Parameters packed as those of a running engine are."""
    isa, head = kernels_in(served), getattr(served, "head", None)
    codes = head.codes if isinstance(head, Packed) and head.is_tied else None
    scheme = None if codes is None else codes.scheme
    return params if isa is None else packed(params, isa, tied_head=scheme)


def kernels_in(params: Any) -> str | None:
    """The instruction set of the kernels that multiply parameters, or None."""
    target = target_in(params)
    return None if target is None else library.isa_of(target)


def target_in(params: Any) -> str | None:
    """The name of those kernels for XLA, or None."""
    found = (x.target for x in jax.tree.leaves(params, is_leaf=is_record) if isinstance(x, Packed))
    return next(found, None)


def is_packed(params: Any) -> bool:
    return holds(params, Packed)


def is_record(x: Any) -> bool:
    return isinstance(x, Packed | Transposed | Quantised)
