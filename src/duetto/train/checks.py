"""Checks of what a trainer passes, and of where the bits of an engine can be had."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from ..checkpoints.nnx import params_from_state
from ..cpu_kernels.library import load_library
from ..kvcache.kernels.cpu_attention import CPU_HEAD_SIZES
from ..model.config import GroupedQuery, LayerKind, ModelConfig
from ..model.sharding import tree_devices
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import leaves_by_path
from ..model.weights.cpu.panels import PANEL_DTYPES
from ..refusals import ensure, quote

INEXACT = "duetto.train.token_logprobs(..., exact=False) computes by XLA, with other bits"


def find_kernel_isa(config: ModelConfig, params: Decoder) -> str:
    """Return the instruction set of the kernels of an engine on this device. Raises ValueError where they do
    not make all of its bits."""
    require_exact(explain_placement(params) or explain_inexact(config, params.embed.dtype))
    return load_library().isa


def require_exact(reason: str) -> None:
    """Raise ValueError if there is a reason why the bits of an engine cannot be had."""
    ensure(not reason, f"exact log-probabilities are not possible: {reason}; {INEXACT}")


def explain_inexact(config: ModelConfig, dtype: Any) -> str:
    """Return why no kernels compute a model's texts with the bits of every step; "" if they do."""
    library = load_library()
    if not library.isas:
        return library.refusal
    if dtype not in PANEL_DTYPES:
        return (
            f"CPU kernels do not multiply {dtype}, but {', '.join(jnp.dtype(x).name for x in PANEL_DTYPES)}"
        )
    return next(filter(None, (explain_uncovered_layer(kind, i) for i, kind in enumerate(config.layers))), "")


def explain_length(config: ModelConfig, length: int) -> str:
    """Return why an engine computes the keys of texts of a length anew; "" if it does not."""
    limit = config.longrope_boundary
    if limit is None or length <= limit:
        return ""
    return f"an engine computes keys anew at {limit} tokens (longrope), and texts have {length}"


def explain_uncovered_layer(kind: LayerKind, i: int) -> str:
    """Return what XLA computes in a layer, with bits that depend on the number of rows; "" for nothing."""
    mixer = kind.mixer
    if not isinstance(mixer, GroupedQuery) or kind.parallel_mixer is not None:
        return f"layer {i} has a {type(kind.mixers[-1]).__name__}, which XLA computes"
    if mixer.alibi is not None:
        return f"layer {i} has ALiBi's scores, which XLA computes"
    if mixer.head_size not in CPU_HEAD_SIZES:
        return f"layer {i} has heads of {mixer.head_size} numbers; kernels take multiples of 16 up to 256"
    return ""


def explain_placement(params: Decoder) -> str:
    """Return why parameters are where no CPU kernels are; "" if they are on one CPU, or not known yet."""
    devices = find_known_devices(params)
    platform = next(iter(devices)).platform if devices else jax.default_backend()
    other = "" if platform == "cpu" else f"on a {platform} only a replay has its bits (LLM.logprobs_fn)"
    return explain_devices(params) or other


def explain_devices(params: Decoder) -> str:
    """Return why parameters are on too many devices; "" if they are on one, or not known yet."""
    count = len(find_known_devices(params))
    return "" if count < 2 else f"parameters are on {count} devices, whose sums are added up in another order"


def find_known_devices(params: Decoder) -> frozenset[Any]:
    """Return the devices of parameters, but of traced ones."""
    leaves = jax.tree.leaves(params)
    return tree_devices([x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)])


def check_texts(
    config: ModelConfig, tokens: Any, lengths: Any, temperature: Any
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Return tokens and lengths as arrays, with tokens 0 behind the end of each text. Raises ValueError for
    what is not allowed, as far as numbers are known while a function is traced."""
    tokens = as_known_array(tokens)
    is_matrix = tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer)
    shape = f"{tokens.dtype} {list(tokens.shape)}"
    is_text = is_matrix and tokens.shape[0] > 0 and tokens.shape[1] > 1
    ensure(is_text, f"tokens {shape} are not allowed: integers [B,T], B 1 or more, T 2 or more")
    B, T = tokens.shape
    limit = config.max_position if config.learned_positions else T
    ensure(T - 1 <= limit, f"tokens of {T} positions are not allowed: the model has {limit}")
    lengths = np.full(B, T, np.int32) if lengths is None else as_known_array(lengths)
    is_vector = lengths.shape == (B,) and jnp.issubdtype(lengths.dtype, jnp.integer)
    ensure(is_vector, f"lengths {lengths.dtype} {list(lengths.shape)} are not allowed: integers [{B}]")
    check_range("lengths", lengths, 1, T)
    check_temperature(temperature, B)
    is_known = not any(isinstance(x, Tracer) for x in (tokens, lengths))
    module = np if is_known else jnp
    tokens = module.where(module.arange(T)[None] < lengths[:, None], tokens, 0)
    check_range("tokens", tokens, 0, config.vocab_size - 1)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def check_prompt_lengths(prompt_lengths: Any, tokens: Int[Array, "B T"]) -> Int[Array, " B"] | None:
    """Return the lengths of prompts as an array, if there are any. Raises ValueError for others than integers
    [B] from 1 to T."""
    if prompt_lengths is None:
        return None
    (B, T), sizes = tokens.shape, as_known_array(prompt_lengths)
    is_vector = sizes.shape == (B,) and jnp.issubdtype(sizes.dtype, jnp.integer)
    ensure(is_vector, f"prompt_lengths {sizes.dtype} {list(sizes.shape)} are not allowed: integers [{B}]")
    check_range("prompt_lengths", sizes, 1, T)
    return jnp.asarray(sizes, jnp.int32)


def as_known_array(x: Any) -> Any:
    """Return numbers as a NumPy array, or a tracer as it is: jax would trace known numbers too."""
    return x if isinstance(x, Tracer) else np.asarray(x)


def check_range(name: str, x: Any, low: int, high: int) -> None:
    """Raise ValueError for a number outside of a range, if numbers are known."""
    if not isinstance(x, Tracer) and x.size:
        wrong = next((n for n in (int(x.min()), int(x.max())) if not low <= n <= high), low)
        ensure(low <= wrong <= high, f"{name} has {wrong}: from {low} to {high} is allowed")


def check_temperature(temperature: Any, B: int) -> None:
    """Raise ValueError for a temperature that is not one number above 0, or one for each of B texts."""
    shape = jnp.shape(temperature)
    ensure(shape in ((), (B,)), f"temperature {list(shape)} is not allowed: one number, or [{B}]")
    if not isinstance(temperature, Tracer):
        numbers = np.asarray(temperature, np.float32)
        is_allowed = bool((np.isfinite(numbers) & (numbers >= np.finfo(np.float32).tiny)).all())
        message = "is not allowed: above 0, as greedy choices have no gradient, and finite"
        ensure(is_allowed, f"temperature {quote(temperature)} {message}")


def check_floats(params: Decoder) -> None:
    """Raise ValueError, with the path, for a parameter that is not of floats."""
    for path, leaf in leaves_by_path(params).items():
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        ensure(is_float, f"parameter {path} of {leaf.dtype} is not allowed: floating-point numbers")


def check_dtypes(config: ModelConfig, params: Decoder) -> None:
    """Raise ValueError, with the path, for a parameter that is not of the embedding's dtype, or its own."""
    check_floats(params)
    specs = leaves_by_path(decoder_spec(config))
    for path, leaf in leaves_by_path(params).items():
        expected = jnp.dtype(specs[path].dtype or params.embed.dtype)
        ensure(leaf.dtype == expected, f"parameter {path} of {leaf.dtype} is not allowed: {expected}")


def cast_params(config: ModelConfig, params: Any, dtype: Any) -> Decoder:
    """Return parameters in the dtype in which an engine serves them. Raises ValueError as `params_from_state`
    does, and for a parameter that is not of floats."""
    params = params_from_state(config, params)
    check_floats(params)
    return jax.tree.map(lambda x, spec: jnp.asarray(x, spec.dtype or dtype), params, decoder_spec(config))
