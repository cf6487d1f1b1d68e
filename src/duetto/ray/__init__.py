"""Batch inference on Ray, in the shape of `ray.data.llm`.

    processor = build_processor(ProcessorConfig("Qwen/Qwen3-0.6B", concurrency=4), preprocess, postprocess)
    dataset = processor(dataset)

`duetto.ray.serve` has servers. Ray is an extra (`pip install 'duetto[ray]'`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import ERROR, Predictor, ProcessorConfig, RayBackend, build_processor, postprocess_row

FORMER_NAMES = {"finished": "postprocess_row"}
__all__ = ["ERROR", "Predictor", "ProcessorConfig", "RayBackend", "build_processor", "postprocess_row"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562), because an ingress needs no jax."""
    name = FORMER_NAMES.get(name, name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".batch", __name__), name)
