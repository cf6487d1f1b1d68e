"""The names of `vllm.logprobs`."""

from .serve.text.outputs import Logprob

__all__ = ["Logprob"]
