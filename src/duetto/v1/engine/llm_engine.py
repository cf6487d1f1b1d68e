"""The name of `vllm.v1.engine.llm_engine`."""

from ...engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
