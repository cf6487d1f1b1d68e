"""The name of `vllm.entrypoints.llm`."""

from ..serve.llm.llm import LLM

__all__ = ["LLM"]
