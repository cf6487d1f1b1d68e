"""duetto: large language models in JAX, as pure prefill and decode steps over a donated, paged KV cache."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sampling.params import SamplingParams
    from .serve.llm import LLM, Delta, Score
    from .serve.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = version("duetto")
__all__ = ["LLM", "CompletionOutput", "Delta", "Logprob", "RequestOutput", "SamplingParams", "Score"]

HOMES = {
    "SamplingParams": ".sampling.params",
    **dict.fromkeys(("LLM", "Delta", "Score"), ".serve.llm"),
    **dict.fromkeys(("CompletionOutput", "Logprob", "RequestOutput"), ".serve.outputs"),
}


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use (PEP 562), so that `duetto --help` does not wait for jax."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
