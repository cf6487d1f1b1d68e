"""The names of `vllm.logprobs`."""

from .serve.outputs import Logprob

__all__ = ["Logprob"]
