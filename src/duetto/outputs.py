"""The names of `vllm.outputs`."""

from .serve.text.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
