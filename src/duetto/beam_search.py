"""The names of `vllm.beam_search`."""

from .serve.llm.tasks.beam import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
