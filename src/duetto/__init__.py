"""duetto: large language models in JAX, as pure prefill and decode steps over a donated, paged KV cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.arg_utils import AsyncEngineArgs, EngineArgs
    from .engine.async_llm_engine import AsyncLLMEngine
    from .engine.llm_engine import LLMEngine
    from .inputs import PromptType, TextPrompt, TokensPrompt
    from .model.pooling import PoolingParams
    from .sampling.params import BeamSearchParams, SamplingParams
    from .serve.llm.llm import LLM
    from .serve.llm.tasks.likelihood import LogLikelihood
    from .serve.text.outputs import CompletionOutput, Delta, EmbeddingRequestOutput, Logprob, RequestOutput

    __version__: str

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "BeamSearchParams", "CompletionOutput", "Delta",
    "EmbeddingRequestOutput", "EngineArgs", "LLMEngine", "LogLikelihood", "Logprob", "PoolingParams",
    "PromptType", "RequestOutput", "SamplingParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip

HOMES = {
    **dict.fromkeys(("BeamSearchParams", "SamplingParams"), ".sampling.params"),
    "LLM": ".serve.llm.llm",
    "PoolingParams": ".model.pooling",
    "LogLikelihood": ".serve.llm.tasks.likelihood",
    **dict.fromkeys(
        ("CompletionOutput", "Delta", "EmbeddingRequestOutput", "Logprob", "RequestOutput"),
        ".serve.text.outputs",
    ),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), ".engine.arg_utils"),
    "LLMEngine": ".engine.llm_engine",
    "AsyncLLMEngine": ".engine.async_llm_engine",
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), ".inputs"),
}


def __getattr__(name: str) -> Any:
    """Public names are imported at their first use (PEP 562), so that `duetto --help` does not wait for
    jax."""
    if name == "__version__":
        return import_module("importlib.metadata").version("duetto")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
