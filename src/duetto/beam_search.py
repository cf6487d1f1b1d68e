"""The names of `vllm.beam_search`."""

from .serve.api.beam import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
