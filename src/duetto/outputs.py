"""The names of `vllm.outputs`."""

from .serve.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
