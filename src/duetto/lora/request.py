"""`LoRARequest`, where vLLM's scripts import it."""

from ..serve.adapters.request import LoRARequest

__all__ = ["LoRARequest"]
