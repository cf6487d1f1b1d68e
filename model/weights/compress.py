"""Which weights are quantised or factored: a plan, and its application to parameters or to their specs.

A weight that is quantised already is treated like any other: another scheme dequantises and quantises it
again, its own leaves it as it is.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from ..config import ModelConfig
from ..sharding import fitted
from ..transformer import Decoder, decoder_spec
from ..tree import Spec, holds, is_spec
from .cpu.panels import Packed
from .lowrank import LowRank, low_rank
from .quant import Quantised, Scheme, quantised

T = TypeVar("T")
Method = Scheme | float
SCHEMES = tuple(name for name in get_args(Scheme) if name != "fp4")  # fp4 only comes in checkpoints
WHOLE = "dequantize"
# Forms of a model's weights: as they are, with projections in a scheme, or as arrays.
FORMS: tuple[str | None, ...] = (None, *SCHEMES, WHOLE)
# Axes over which the product with a weight sums, counted from the last, so that experts may come first.
CONTRACTED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "k", "v", "q_up", "k_up", "v_up"), (-3,)),
    **dict.fromkeys(("q_down", "kv_down", "k_down", "gate", "up", "down"), (-2,)),
    "o": (-3, -2),
    "head": (-1,),
}


@dataclass(frozen=True)
class CompressionPlan:
    """Rules (pattern of a weight's path, method), where a method is "int8", "int4", "fp8", or the share of
    the weight's numbers that a low-rank factorisation keeps.

    Patterns are those of file names, as "layers.*.ffn.*"; a weight's first rule counts, and weights without a
    rule stay as they are. Routers, norms, biases, embeddings and positions are never compressed. Raises
    ValueError for an unknown method.
    """

    rules: tuple[tuple[str, Method], ...]

    def __post_init__(self):
        for pattern, method in self.rules:
            if method not in SCHEMES and not (isinstance(method, float) and 0 < method < 1):
                allowed = f"{', '.join(SCHEMES)}, or a share between 0.0 and 1.0"
                raise ValueError(f"{method!r} for {pattern!r} is not allowed: {allowed}")

    def method(self, path: str) -> Method | None:
        """The method for the weight at a path."""
        return next((method for pattern, method in self.rules if fnmatchcase(path, pattern)), None)


def projections(method: Method) -> CompressionPlan:
    """The plan for all projections of all layers, the output head left out."""
    return CompressionPlan((("layers.*", method),))


def compress(tree: T, plan: CompressionPlan, donate: bool = False) -> T:
    """A tree of parameters, of ShapeDtypeStructs or of specs with the plan's weights compressed, one after
    the other.

    With `donate` each weight is deleted when its compressed form is ready, so that the memory never holds
    both models. Raises ValueError for a rule that meets no weight.
    """
    met: set[str] = set()

    def leaf(key: Any, weight: Any) -> Any:
        path = jax.tree_util.keystr(key, simple=True, separator=".")
        if contracted_at(path):
            met.update(pattern for pattern, _ in plan.rules if fnmatchcase(path, pattern))
        return compressed_at(path, weight, plan, donate)

    done = jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_weight)
    for pattern, _ in plan.rules:
        if pattern not in met:
            raise ValueError(f"rule {pattern!r} meets no weight that can be compressed")
    return done


def contracted_at(path: str) -> tuple[int, ...] | None:
    """Axes over which the product with the weight at a path sums; None of those that are never compressed,
    among them what recurrent layers multiply with, and gates of attention."""
    if ".recurrent." in path or path.endswith("attention.gate"):
        return None
    return CONTRACTED.get(path.rpartition(".")[2])


def compressed_at(path: str, weight: Any, plan: CompressionPlan, donate: bool = False) -> Any:
    """The weight at a path as the plan has it."""
    method = plan.method(path)
    contracted = contracted_at(path)
    return weight if method is None or contracted is None else compressed(weight, contracted, method, donate)


def is_weight(x: Any) -> bool:
    return is_spec(x) or isinstance(x, Quantised)


def compressed(weight: Any, contracted: tuple[int, ...], method: Method, donate: bool = False) -> Any:
    """Compress one weight; returns it unchanged where that is impossible, or would not make it smaller."""
    if is_spec(weight):
        return compressed_spec(weight, contracted, method)
    if isinstance(weight, Quantised) and weight.scheme == method:
        return weight
    if any(isinstance(part, jax.ShapeDtypeStruct) for part in jax.tree.leaves(weight)):
        return jax.eval_shape(partial(encode, contracted=contracted, method=method), weight) or weight
    done = encode(weight, contracted, method)
    return weight if done is None else replaced(weight, done, donate)


def replaced(weight: Any, done: T, donate: bool) -> T:
    """A weight's replacement, placed on its devices; with `donate` the weight's own arrays are deleted."""
    first = jax.tree.leaves(weight)[0]
    if isinstance(first, jax.Array) and not isinstance(first, Tracer):
        done = jax.tree.map(lambda x: jax.device_put(x, fitted(first.sharding, x.shape)), done)
    if donate:
        jax.block_until_ready(done)
        for part in jax.tree.leaves(weight):
            if isinstance(part, jax.Array):
                part.delete()
    return done


@partial(jax.jit, static_argnames=("contracted", "method"))
def encode(
    weight: Float[Array, "..."] | Quantised, contracted: tuple[int, ...], method: Method
) -> Quantised | LowRank | None:
    """The weight by a method; None where that cannot be, or would not make it smaller."""
    if isinstance(weight, Quantised):
        weight = weight.widened(jnp.float32)
    if isinstance(method, str):
        return quantised(weight, contracted, method)
    return low_rank(weight, contracted, method)


def compressed_spec(spec: Spec, contracted: tuple[int, ...], method: Method) -> Any:
    """The specs of a compressed weight; random values drawn from them have the original's scale."""
    shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    form = jax.eval_shape(partial(encode, contracted=contracted, method=method), shape)
    if isinstance(form, LowRank):
        first, after = (len(spec.axes) + i for i in (contracted[0], contracted[-1] + 1))
        each = (spec.scale / form.a.shape[-1] ** 0.5) ** 0.5
        a = Spec(form.a.shape, (*spec.axes[:after], "low_rank"), 0.0, each, spec.dtype)
        b = (*spec.axes[:first], "low_rank", *spec.axes[after:])
        return LowRank(a, Spec(form.b.shape, b, 0.0, each, spec.dtype))
    if form is None:
        return spec
    # mean and deviation of the codes, of the bytes where each holds two
    mean, spread = {"int8": (0.0, 32.0), "fp8": (0.0, 64.0), "int4": (128.0, 32.0)}[form.scheme]
    one = spec.scale / (4 if form.scheme == "int4" else spread)
    axes = tuple(
        name if n == size or n > 1 else "group"
        for name, n, size in zip(spec.axes, form.scales.shape, spec.shape, strict=True)
    )
    return replace(
        form,
        values=Spec(form.values.shape, spec.axes, mean, spread, form.values.dtype),
        scales=Spec(form.scales.shape, axes, one, 0.0, form.scales.dtype),
    )


def quantize_params(params: T, scheme: Method, donate: bool = False) -> T:
    """A model's projections in a scheme: "int8", "int4" or "fp8"; see `compress`."""
    return compress(params, projections(scheme), donate)


def plan_for(form: str | None) -> CompressionPlan:
    """Compression plan of one of FORMS for weights that are arrays."""
    return projections(form) if form in SCHEMES else CompressionPlan(())  # type: ignore[arg-type]


def in_form(params: T, form: str | None, dtype: Any, donate: bool = False) -> T:
    """Parameters in one of FORMS, dequantised ones in a dtype; the same object where nothing changes, and if
    weights are `Packed`: they were in their form before."""
    if holds(params, Packed):
        return params
    if form == WHOLE:
        return dequantize_params(params, dtype, donate)
    return params if form is None else quantize_params(params, form, donate)  # type: ignore[arg-type]


def dequantize_params(params: T, dtype: Any, donate: bool = False) -> T:
    """A model's quantised weights as arrays of a dtype, one after the other."""

    def leaf(weight: Any) -> Any:
        if not isinstance(weight, Quantised):
            return weight
        return replaced(weight, widen(weight, jnp.dtype(dtype)), donate)

    return jax.tree.map(leaf, params, is_leaf=is_weight)


@partial(jax.jit, static_argnames="dtype")
def widen(weight: Quantised, dtype: Any) -> Float[Array, "..."]:
    return weight.widened(dtype)


def form_spec(config: ModelConfig, form: str | None) -> Decoder:
    """The specs of a model in one of FORMS, of arrays where that is None."""
    return compress(decoder_spec(config), plan_for(form))
