"""Which weights are quantised or factored: a plan, and its application to parameters or to their specs; and
which have products that quantise their input.

A quantised weight is treated like any other: its own scheme leaves it unchanged, and another scheme
dequantises and quantises it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from ....refusals import ensure
from ...config import ModelConfig
from ...sharding import fit_sharding
from ...transformer import Decoder, decoder_spec
from ...tree import Spec, has_instance, is_spec, map_by_path, map_instances, paths_and_leaves
from ..cpu.panels import Packed
from ..input_quantised import InputQuantised
from ..nibbles import has_group_scales
from ..quant import Quantised, quantise_weight
from ..schemes import ENCODED_SCHEMES, SCHEMES
from .lowrank import LowRank, factorise_weight

T = TypeVar("T")
CompressionMethod = str | float
DEQUANTIZE_FORM = "dequantize"
# Forms of a model's weights: as they are, with projections in a scheme, or as arrays.
WEIGHT_FORMS: tuple[str | None, ...] = (None, *ENCODED_SCHEMES, DEQUANTIZE_FORM)
# Axes over which the product with a weight sums, counted from the last, so that experts may come first.
CONTRACTED_AXES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "k", "v", "q_up", "k_up", "v_up"), (-3,)),
    **dict.fromkeys(("q_down", "kv_down", "k_down", "gate", "up", "down"), (-2,)),
    "o": (-3, -2),
    "head": (-1,),
}
# Latent attention multiplies keys' and values' projections in two orders, of which one scales the input.
UNCODED_NAMES = ("k_up", "v_up", "head")
MAX_NAMED_WEIGHTS = 3  # weights that a message names
CODE_SCALES = {  # scales of codes whose products are added up with those of inputs
    **dict.fromkeys(("int8", "fp8"), "with a scale for each output"),
    "int4": "with scales for groups of inputs",
}
MAX_CODE_INPUTS = (1 << 31) // (127 * 128)  # inputs of a product whose sum of codes fits int32


@dataclass(frozen=True)
class CompressionPlan:
    """Rules (pattern of a weight's path, method) for the compression of weights.

    A method is one of `ENCODED_SCHEMES`, or the share of the weight's numbers that a low-rank factorisation
    keeps. Patterns are those of file names, as "layers.*.ffn.*". A weight's first rule counts, and weights
    without a rule stay unchanged. Routers, norms, biases, embeddings and positions are never compressed.
    Raises ValueError for an unknown method.
    """

    rules: tuple[tuple[str, CompressionMethod], ...]

    def __post_init__(self):
        for pattern, method in self.rules:
            if method not in ENCODED_SCHEMES and not (isinstance(method, float) and 0 < method < 1):
                allowed = f"{', '.join(ENCODED_SCHEMES)}, or a share between 0.0 and 1.0"
                raise ValueError(f"{method!r} for {pattern!r} is not allowed: {allowed}")

    def method(self, path: str) -> CompressionMethod | None:
        """Return the method for the weight at a path, or None."""
        return next((method for pattern, method in self.rules if fnmatchcase(path, pattern)), None)


def projection_plan(method: CompressionMethod) -> CompressionPlan:
    """Return the plan for all projections of all layers, without the output head."""
    return CompressionPlan((("layers.*", method),))


def compress(tree: T, plan: CompressionPlan, donate: bool = False) -> T:
    """Compress the plan's weights in a tree of parameters, of ShapeDtypeStructs or of specs, one after the
    other.

    With `donate` each weight is deleted when its compressed form is ready, so that memory never holds both
    models. Raises ValueError for a rule that matches no weight.
    """
    used_patterns: set[str] = set()

    def compress_leaf(path: str, weight: Any) -> Any:
        if contracted_axes(path):
            used_patterns.update(pattern for pattern, _ in plan.rules if fnmatchcase(path, pattern))
        return compress_at_path(path, weight, plan, donate)

    compressed = map_by_path(tree, Quantised, compress_leaf)
    for pattern, _ in plan.rules:
        if pattern not in used_patterns:
            raise ValueError(f"rule {pattern!r} meets no weight that can be compressed")
    return compressed


def contracted_axes(path: str) -> tuple[int, ...] | None:
    """Return the axes over which the product with the weight at a path sums.

    None for weights that are never compressed, among them those of recurrent layers and the gates of
    attention.
    """
    if ".recurrent." in path or path.endswith("attention.gate"):
        return None
    return CONTRACTED_AXES.get(path.rpartition(".")[2])


def compress_at_path(path: str, weight: Any, plan: CompressionPlan, donate: bool = False) -> Any:
    """Compress the weight at a path as the plan says."""
    method = plan.method(path)
    contracted = contracted_axes(path)
    return (
        weight
        if method is None or contracted is None
        else compress_weight(weight, contracted, method, donate)
    )


def compress_weight(
    weight: Any, contracted: tuple[int, ...], method: CompressionMethod, donate: bool = False
) -> Any:
    """Compress one weight. Returns it unchanged if that is impossible, or would not make it smaller."""
    if is_spec(weight):
        return compress_spec(weight, contracted, method)
    if isinstance(weight, Quantised) and weight.scheme == method:
        return weight
    if any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(weight)):
        return jax.eval_shape(partial(encode_weight, contracted=contracted, method=method), weight) or weight
    encoded = encode_weight(weight, contracted, method)
    return weight if encoded is None else place_replacement(weight, encoded, donate)


def place_replacement(weight: Any, replacement: T, donate: bool) -> T:
    """Place a weight's replacement on the weight's devices. With `donate` the weight's own arrays are
    deleted."""
    first = jax.tree.leaves(weight)[0]
    if isinstance(first, jax.Array) and not isinstance(first, Tracer):
        replacement = jax.tree.map(
            lambda x: jax.device_put(x, fit_sharding(first.sharding, x.shape)), replacement
        )
    if donate:
        jax.block_until_ready(replacement)
        for part in jax.tree.leaves(weight):
            if isinstance(part, jax.Array):
                part.delete()
    return replacement


@partial(jax.jit, static_argnames=("contracted", "method"))
def encode_weight(
    weight: Float[Array, "..."] | Quantised, contracted: tuple[int, ...], method: CompressionMethod
) -> Quantised | LowRank | None:
    """Encode a weight by a method. Returns None if that is impossible, or would not make it smaller."""
    if isinstance(weight, Quantised):
        weight = weight.dequantise(jnp.float32)
    if isinstance(method, str):
        return quantise_weight(weight, contracted, method)
    return factorise_weight(weight, contracted, method)


def compress_spec(spec: Spec, contracted: tuple[int, ...], method: CompressionMethod) -> Any:
    """Return the specs of a compressed weight. Random values drawn from them have the original's scale."""
    shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    form = jax.eval_shape(partial(encode_weight, contracted=contracted, method=method), shape)
    if isinstance(form, LowRank):
        first, after = (len(spec.axes) + i for i in (contracted[0], contracted[-1] + 1))
        factor_scale = (spec.scale / form.a.shape[-1] ** 0.5) ** 0.5
        a = Spec(form.a.shape, (*spec.axes[:after], "low_rank"), 0.0, factor_scale, spec.dtype)
        b = (*spec.axes[:first], "low_rank", *spec.axes[after:])
        return LowRank(a, Spec(form.b.shape, b, 0.0, factor_scale, spec.dtype))
    if form is None:
        return spec
    scheme = SCHEMES[form.scheme]
    axes = tuple(
        name if n == size or n > 1 else "group"
        for name, n, size in zip(spec.axes, form.scales.shape, spec.shape, strict=True)
    )
    return replace(
        form,
        values=Spec(form.values.shape, spec.axes, *scheme.random_values, form.values.dtype),
        scales=Spec(form.scales.shape, axes, spec.scale / scheme.code_deviation, 0.0, form.scales.dtype),
    )


def quantize_params(params: T, scheme: CompressionMethod, donate: bool = False) -> T:
    """Quantise a model's projections in one of `ENCODED_SCHEMES`. See `compress`."""
    return compress(params, projection_plan(scheme), donate)


def weight_form_plan(form: str | None) -> CompressionPlan:
    """Return the compression plan of one of `WEIGHT_FORMS`, for weights that are arrays."""
    return projection_plan(form) if form in ENCODED_SCHEMES else CompressionPlan(())


def convert_weight_form(params: T, form: str | None, dtype: Any, donate: bool = False) -> T:
    """Convert parameters to one of `WEIGHT_FORMS`, dequantised ones to a dtype.

    Returns the same object if nothing changes, or if weights are `Packed` or `InputQuantised`: they had their
    form before that.
    """
    if has_instance(params, (Packed, InputQuantised)):
        return params
    if form == DEQUANTIZE_FORM:
        return dequantize_params(params, dtype, donate)
    return params if form is None else quantize_params(params, form, donate)


def dequantize_params(params: T, dtype: Any, donate: bool = False) -> T:
    """Convert a model's quantised weights to arrays of a dtype, one after the other."""

    def dequantise_leaf(weight: Quantised) -> Any:
        return place_replacement(weight, dequantise_weight(weight, jnp.dtype(dtype)), donate)

    return map_instances(params, Quantised, dequantise_leaf)


@partial(jax.jit, static_argnames="dtype")
def dequantise_weight(quantised: Quantised, dtype: Any) -> Float[Array, "..."]:
    """Dequantise a weight, in one compiled program."""
    return quantised.dequantise(dtype)


def form_spec(config: ModelConfig, form: str | None) -> Decoder:
    """Return the specs of a model in one of `WEIGHT_FORMS`. None: of arrays."""
    return compress(decoder_spec(config), weight_form_plan(form))


# ---------------------------------------------------------------- inputs of products


def quantise_inputs(params: T, activations: str | None) -> T:
    """Return parameters, or ShapeDtypeStructs, whose quantised projections are `InputQuantised`.

    activations: key in `ACTIVATION_SCHEMES`, or None, which changes nothing.

    No array is copied. Unchanged are weights that are arrays, an indexer's projections and those of
    `UNCODED_NAMES`, routed experts in 4-bit codes, and what is `Packed`: it was converted before. Raises
    ValueError for a projection with other codes, and if none is quantised.
    """
    if activations is None:
        return params
    kinds = InputQuantised, Packed, Quantised
    weights = [(path, w) for path, w in paths_and_leaves(params, kinds) if isinstance(w, kinds)]
    projections = {
        path: w for path, w in weights if may_quantise_inputs(path) and not is_narrow_expert(path, w)
    }
    check_projection_codes(projections, activations)

    def convert_weight(path: str, weight: Any) -> Any:
        is_converted = path in projections and isinstance(weight, Quantised)
        return InputQuantised(weight, activations) if is_converted else weight

    return map_by_path(params, kinds, convert_weight)


def may_quantise_inputs(path: str) -> bool:
    """Return True for the path of a weight whose products may quantise their input."""
    parts = path.split(".")
    is_projection = parts[0] == "layers" and contracted_axes(path) is not None
    return is_projection and not {"indexer", *UNCODED_NAMES} & {*parts}


def is_narrow_expert(path: str, w: Any) -> bool:
    """Return True for routed experts in 4-bit codes, whose inputs are never quantised."""
    return isinstance(w, Quantised) and ".experts." in path and SCHEMES[w.scheme].codes_per_byte > 1


def check_projection_codes(projections: Mapping[str, Any], activations: str) -> None:
    """Raise ValueError if codes of inputs cannot be multiplied by a `Quantised` projection, or if there is
    none of any form."""
    schemes = [name for name, scheme in SCHEMES.items() if activations in scheme.activations]
    refusal = f"activations={activations!r} is not allowed"
    allowed = " or ".join(f"quantization={name!r}" for name in schemes)
    expected = " or ".join(f"{name} codes {CODE_SCALES[name]}" for name in schemes)
    ensure(bool(projections), f"{refusal}: the model has no quantised projections; set {allowed}")
    refused = [
        f"{path} has {w.scheme} codes {list(w.shape)} with scales {list(w.scales.shape)}"
        + ("" if w.zeros is None else " and zeros")
        for path, w in projections.items()
        if isinstance(w, Quantised) and not (w.scheme in schemes and can_sum_codes(path, w))
    ]
    ensure(
        not refused,
        f"{refusal}: {'; '.join(refused[:MAX_NAMED_WEIGHTS])}, {len(refused)} of {len(projections)} weights; "
        f"expected {expected}, without zeros, of at most {MAX_CODE_INPUTS} inputs",
    )


def can_sum_codes(path: str, w: Quantised) -> bool:
    """Return True if a projection's sums fit int32, and no zeros but scales follow: of outputs, or one for
    all; of groups of inputs for 4-bit codes."""
    axes = contracted_axes(path) or ()
    group = prod(w.shape[axis] // w.scales.shape[axis] for axis in axes)
    if w.zeros is not None or group > MAX_CODE_INPUTS:
        return False
    if SCHEMES[w.scheme].codes_per_byte > 1:
        return has_group_scales(w.shape, w.scales.shape, len(axes))
    return w.has_channel_scales and all(w.scales.shape[axis] == 1 for axis in axes)
