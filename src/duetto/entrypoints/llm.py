"""The name of `vllm.entrypoints.llm`."""

from ..serve.api.llm import LLM

__all__ = ["LLM"]
