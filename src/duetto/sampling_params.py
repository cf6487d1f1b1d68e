"""The names of `vllm.sampling_params`."""

from typing import NoReturn

from .sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from .sampling.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
REFUSED_NAMES = {
    "GuidedDecodingParams": "StructuredOutputsParams has taken its place",
    "PoolingParams": "pooling models are not supported",
}


def __getattr__(name: str) -> NoReturn:
    """Raise ImportError, with the reason, for a name of vLLM's that is not supported."""
    if name in REFUSED_NAMES:
        raise ImportError(f"{name}: {REFUSED_NAMES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
