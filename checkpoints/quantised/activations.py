"""Schemes of activations, the inputs of quantised products, as a `quantization_config` states them."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...refusals import ensure, quote
from ..families.fields import Raw
from .config import check_quantization
from .known_fields import config_groups

CODE_BITS = 8
SCHEME_NAMES = {"int": "int8", "float": "fp8"}  # by a group's type


def stated_activations(config: Mapping[str, Any]) -> str | None:
    """Return the scheme in which a `quantization_config` quantises activations; None if it does not.

    Scales of a file are not used: each token has its own. Raises ValueError for other schemes than int8 and
    fp8, for several, and for a config that `check_quantization` refuses.
    """
    check_quantization({"quantization_config": config})
    schemes = set(list_activation_schemes(config))
    if len(schemes) > 1:
        raise ValueError(f"activations are in {' and '.join(sorted(map(str, schemes)))}, expected one scheme")
    return next(iter(schemes), None)


def list_activation_schemes(config: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the scheme of activations of each part of a `quantization_config`. None: they are not
    quantised."""
    method = config.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        yield "fp8"
    elif method == "modelopt" and config.get("quant_algo"):
        layers = config.get("quantized_layers") or {"": config}
        yield from (modelopt_scheme(layer.get("quant_algo")) for layer in layers.values())
    elif method in ("compressed-tensors", "modelopt"):
        for _, group in config_groups(config):
            yield group_scheme(group.get("input_activations") or {})


def modelopt_scheme(algorithm: Any) -> str | None:
    """Return the scheme of activations of one of ModelOpt's algorithms."""
    if algorithm == "W4A16_NVFP4":
        return None
    if str(algorithm).startswith("FP8"):
        return "fp8"
    raise ValueError(f"quant_algo is {quote(algorithm)}, whose activations are not supported: expected FP8")


def group_scheme(activations: Raw) -> str | None:
    """Return the scheme of the `input_activations` of one of compressed-tensors' groups."""
    if not activations:
        return None
    ensure(
        isinstance(activations, Mapping), f"input_activations are {quote(activations)}, expected an object"
    )
    kind, bits = activations.get("type", "int"), activations.get("num_bits", CODE_BITS)
    if bits != CODE_BITS or kind not in [*SCHEME_NAMES]:
        raise ValueError(
            f"input_activations are {quote(kind)} of {quote(bits)} bits, expected int or float of 8"
        )
    return SCHEME_NAMES[kind]
