"""The names of `vllm.beam_search`."""

from .serve.beam import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
