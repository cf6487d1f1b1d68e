"""duetto: large language models in JAX, as pure prefill and decode steps over a donated, paged KV cache."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compat import module_aliases

if TYPE_CHECKING:
    from .compat.arg_utils import AsyncEngineArgs, EngineArgs
    from .compat.async_llm import AsyncLLMEngine
    from .compat.llm_engine import LLMEngine
    from .model.pooling import PoolingParams
    from .prompt_types import PromptType, TextPrompt, TokensPrompt
    from .sampling.custom_processors import logits_processor
    from .sampling.params import BeamSearchParams, SamplingParams
    from .serve.llm.llm import LLM
    from .serve.llm.tasks.likelihood import LogLikelihood
    from .serve.text.outputs import CompletionOutput, EmbeddingRequestOutput, Logprob, RequestOutput

    __version__: str

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLMEngine", "BeamSearchParams", "CompletionOutput",
    "EmbeddingRequestOutput", "EngineArgs", "LLMEngine", "LogLikelihood", "Logprob", "PoolingParams",
    "PromptType", "RequestOutput", "SamplingParams", "TextPrompt", "TokensPrompt",
    "logits_processor",
]  # fmt: skip

PUBLIC_HOMES = {
    **dict.fromkeys(("BeamSearchParams", "SamplingParams"), ".sampling.params"),
    "LLM": ".serve.llm.llm",
    "logits_processor": ".sampling.custom_processors",
    "PoolingParams": ".model.pooling",
    "LogLikelihood": ".serve.llm.tasks.likelihood",
    **dict.fromkeys(
        ("CompletionOutput", "EmbeddingRequestOutput", "Logprob", "RequestOutput"),
        ".serve.text.outputs",
    ),
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), ".compat.arg_utils"),
    "LLMEngine": ".compat.llm_engine",
    "AsyncLLMEngine": ".compat.async_llm",
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), ".prompt_types"),
}


module_aliases.install_modules(sys.modules[__name__])


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562), so that `duetto --help` does not wait for jax."""
    if name == "__version__":
        return import_module("importlib.metadata").version("duetto")
    if name not in PUBLIC_HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(PUBLIC_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
