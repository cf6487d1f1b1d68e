"""duetto: large language models in JAX, as pure prefill and decode steps over a donated, paged KV cache."""

from importlib.metadata import version

from .sampling.params import SamplingParams
from .serve.llm import LLM, Delta, Score
from .serve.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = version("duetto")
__all__ = ["LLM", "CompletionOutput", "Delta", "Logprob", "RequestOutput", "SamplingParams", "Score"]
