"""The name of `vllm.entrypoints.llm`."""

from ..serve.llm import LLM

__all__ = ["LLM"]
