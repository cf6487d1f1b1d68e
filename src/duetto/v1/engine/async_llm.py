"""The name of `vllm.v1.engine.async_llm`."""

from ...engine.async_llm_engine import AsyncLLM

__all__ = ["AsyncLLM"]
