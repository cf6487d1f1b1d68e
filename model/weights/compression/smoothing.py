"""SmoothQuant (Xiao et al., arXiv 2211.10438): outlier channels of norms' outputs, moved into weights.

Channel j of a norm's output is divided by a factor s_j, and the rows of the weights that multiply it are
multiplied by s_j. The products stay what they were, up to rounding. Codes of 8 bits lose less of the smoothed
rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from ...attention import Attention, causal
from ...config import Experts, LayerKind, ModelConfig, NormKind
from ...experts.mixture import MoE
from ...ffn import FFN
from ...latent import LatentAttention
from ...layers import Norm, normalise
from ...recurrent.convolution import ShortConvolution
from ...recurrent.delta import DeltaAttention
from ...recurrent.mamba import MambaMixer
from ...transformer import Decoder, Layer, decoder_spec, forward
from ...tree import Spec, leaves_by_path, map_by_path
from .compress import contracted_axes, place_replacement

T = TypeVar("T")
ALPHA = 0.5  # share of the outliers that goes to the weights
NO_GAIN = "no gain to fold factors into"
NO_QUANTISED_READER = "no weight that can be quantised reads it"
UNKNOWN_READER = "not all weights that read it are known"
# Weights that read a sublayer's input, by the class of its parameters: all of them.
INPUT_WEIGHTS: dict[type, tuple[str, ...]] = {
    Attention: ("q", "k", "v", "gate", "head_gate"),
    LatentAttention: ("q", "q_down", "kv_down", "indexer.k_down", "indexer.weigh"),
    DeltaAttention: ("q", "k", "v", "rate", "decay", "gate", "decay_down", "gate_down"),
    ShortConvolution: ("before", "after", "v"),
    MambaMixer: ("z", "v", "k", "q", "step"),
    FFN: ("gate", "up", "output_gate"),
    MoE: ("router", "experts.gate", "experts.up", "shared.gate", "shared.up", "shared.output_gate"),
}


@dataclass(frozen=True)
class InputNorm:
    """Norm of a sublayer's input, and the weights that read its output.

    path: path of the norm, such as "layers.0.attention_norm".
    kind: kind of the norm.
    weight_axes: axis of the norm's channels in each weight, by the weight's path.
    obstacle: reason why factors cannot be folded into the norm; "" if there is none.
    """

    path: str
    kind: NormKind
    weight_axes: Mapping[str, int]
    obstacle: str = ""

    @property
    def quantised_axes(self) -> dict[str, int]:
        """Return `weight_axes` of the weights that can be quantised."""
        return {path: axis for path, axis in self.weight_axes.items() if contracted_axes(path) is not None}


def find_input_norms(config: ModelConfig) -> list[InputNorm]:
    """Return the norms of all sublayers' inputs, in the order of the layers."""
    specs = decoder_spec(config)
    leaves = leaves_by_path(specs)
    return [
        describe_input_norm(leaves, f"layers.{i}.", path, norm_kind, readers)
        for i, (layer, kind) in enumerate(zip(specs.layers, config.layers, strict=True))
        for path, norm_kind, readers in list_norm_readers(layer, kind, config)
    ]


def list_norm_readers(
    layer: Layer, kind: LayerKind, c: ModelConfig
) -> list[tuple[str, NormKind, dict[str, Any]]]:
    """Return the norms of a layer's inputs: path in the layer, kind, and the sublayers that read it, by
    path."""
    mixers = {"attention": layer.attention, "recurrent": layer.recurrent}
    readers = {path: w for path, w in mixers.items() if w is not None}
    if c.parallel == "one norm" or kind.ffn is None:
        return [("attention_norm", c.norm, readers | ({} if kind.ffn is None else {"ffn": layer.ffn}))]
    norms = [("attention_norm", c.norm, readers)]
    if not isinstance(layer.ffn, MoE) or layer.ffn.norms is None:
        return [*norms, ("ffn_norm", c.norm, {"ffn": layer.ffn})]
    assert isinstance(kind.ffn, Experts) and kind.ffn.norms is not None
    parts = {"experts": layer.ffn.experts, "shared": layer.ffn.shared}
    return norms + [
        (f"ffn.norms.{name}", kind.ffn.norms, {f"ffn.{name}": w})
        for name, w in parts.items()
        if w is not None
    ]


def describe_input_norm(
    leaves: Mapping[str, Spec], layer_path: str, path: str, kind: NormKind, readers: Mapping[str, Any]
) -> InputNorm:
    """Return a norm with the weights that read it, and what keeps factors from being folded into it.

    leaves: specs of all parameters, by path.
    readers: parameters of the sublayers that read the norm, by path in the layer.
    """
    weights = [
        f"{layer_path}{sublayer}.{name}"
        for sublayer, w in readers.items()
        for name in INPUT_WEIGHTS.get(type(w), ())
    ]
    weight_axes = {
        name: leaves[name].axes.index("model")
        for name in weights
        if name in leaves and "model" in leaves[name].axes
    }
    norm = InputNorm(layer_path + path, kind, weight_axes)
    if not all(type(w) in INPUT_WEIGHTS for w in readers.values()):
        return replace(norm, obstacle=UNKNOWN_READER)
    if f"{norm.path}.gain" not in leaves:
        return replace(norm, obstacle=NO_GAIN)
    return norm if norm.quantised_axes else replace(norm, obstacle=NO_QUANTISED_READER)


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True)
class NormProbe:
    """Norm that collects the largest magnitude of each channel of its output while a program is traced.

    maxima: where the norm's float32 [D] is put, by `path`.
    is_token: True for the rows that count; the others pad the text.
    """

    norm: Norm
    path: str
    maxima: dict[str, Any]
    is_token: Bool[Array, " rows"]

    @property
    def gain(self) -> Any:
        """Return the gain of the norm."""
        return self.norm.gain

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]:
        """Normalise as the norm does, and record the magnitudes."""
        out = normalise(x, self.norm, kind, axes)
        rows = jnp.abs(out.astype(jnp.float32)).reshape(-1, out.shape[-1])
        self.maxima[self.path] = jnp.where(self.is_token[:, None], rows, 0.0).max(axis=0)
        return out


@partial(jax.jit, static_argnames=("config", "paths"))
def measure_norm_outputs(
    params: Decoder,
    config: ModelConfig,
    paths: tuple[str, ...],
    tokens: Int[Array, "1 T"],
    length: Int[Array, ""],
) -> dict[str, Float32[Array, " D"]]:
    """Return the largest magnitude of each channel of norms' outputs over one text, by the norms' paths.

    length: number of tokens of the text; those behind pad it.
    """
    maxima: dict[str, Any] = {}
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def insert_probe(path: str, leaf: Any) -> Any:
        return NormProbe(leaf, path, maxima, positions[0] < length) if path in paths else leaf

    forward(map_by_path(params, Norm, insert_probe), config, tokens, positions, causal, lengths=length[None])
    return maxima


# ---------------------------------------------------------------- folding


def smooth_params(
    params: T,
    norms: Sequence[InputNorm],
    maxima: Mapping[str, Float32[np.ndarray, " D"]],
    donate: bool = False,
) -> T:
    """Fold factors into norms and into the weights that read them, one norm after the other.

    maxima: largest magnitude of each channel of each norm's output, by the norm's path.
    With `donate` an array is deleted when its replacement is ready.
    """
    leaves = leaves_by_path(params)
    replacements: dict[str, Any] = {}
    for norm in norms:
        for path, array in fold_into_norm(leaves, norm, maxima[norm.path]):
            replacements[path] = place_replacement(leaves[path], array, donate)
    return map_by_path(params, (), lambda path, leaf: replacements.get(path, leaf))


def fold_into_norm(
    leaves: Mapping[str, Any], norm: InputNorm, maxima: Float32[np.ndarray, " D"]
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the new array of each parameter that a norm's factors change."""
    magnitudes = [channel_maxima(leaves[path], axis) for path, axis in norm.quantised_axes.items()]
    factors = smoothing_factors(maxima, np.max(magnitudes, axis=0))
    gain, bias = f"{norm.path}.gain", f"{norm.path}.bias"
    divided, factors = divide_gain(np.asarray(leaves[gain]), norm.kind.offset, factors)
    yield gain, divided
    if bias in leaves:
        yield bias, (np.asarray(leaves[bias], np.float32) / factors).astype(leaves[bias].dtype)
    for path, axis in norm.weight_axes.items():
        yield path, multiply_rows(leaves[path], factors, axis)


def smoothing_factors(
    output_maxima: Float32[np.ndarray, " D"], weight_maxima: Float32[np.ndarray, " D"]
) -> Float32[np.ndarray, " D"]:
    """Return the factor of each channel: x^ALPHA / w^(1 - ALPHA), or 1 if one of the two is 0.

    x and w are the largest magnitudes of the channel in the norm's output and in the weights.
    """
    is_used = (output_maxima > 0) & (weight_maxima > 0)
    x, w = (np.where(is_used, maxima, np.float32(1)) for maxima in (output_maxima, weight_maxima))
    return x**ALPHA / w ** (1 - ALPHA)


def divide_gain(
    gain: Num[np.ndarray, " D"], offset: float, factors: Float32[np.ndarray, " D"]
) -> tuple[Num[np.ndarray, " D"], Float32[np.ndarray, " D"]]:
    """Return a gain divided by factors, in its dtype, and the factors by which the rounded gain is smaller.

    Rounding is coarse where an offset is close to the gain's negative. A channel whose gain would be 0 or
    infinite keeps it.
    """
    whole = gain.astype(np.float32) + np.float32(offset)
    divided = (whole / factors - np.float32(offset)).astype(gain.dtype)
    rounded = divided.astype(np.float32) + np.float32(offset)
    is_divided = np.isfinite(rounded) & (rounded != 0)
    exact = whole / np.where(is_divided, rounded, 1)
    return np.where(is_divided, divided, gain), np.where(is_divided, exact, 1).astype(np.float32)


@partial(jax.jit, static_argnames="axis")
def channel_maxima(weight: Float[Array, "*shape"], axis: int) -> Float32[Array, " D"]:
    """Return the largest magnitude in a weight of each channel of an axis."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    return jnp.abs(weight).max(axis=others).astype(jnp.float32)


@partial(jax.jit, static_argnames="axis")
def multiply_rows(
    weight: Float[Array, "*shape"], factors: Float32[Array, " D"], axis: int
) -> Float[Array, "*shape"]:
    """Multiply each channel of a weight's axis by its factor, in the weight's dtype."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    return (weight.astype(jnp.float32) * jnp.expand_dims(factors, others)).astype(weight.dtype)
