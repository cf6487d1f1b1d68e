"""Arguments and methods of vLLM's `LLM` that are refused here, with what to use instead."""

from collections.abc import Callable
from typing import Any, NoReturn

from ...neutral import check_neutral


def check_all(**given: Any) -> None:
    """Raise ValueError for an argument of vLLM's, or one of a list of them, that has an effect there and none
    here."""
    for name, value in given.items():
        for one in value if isinstance(value, (list, tuple)) and value else [value]:
            check_neutral("call", name, one)


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises NotImplementedError, with what to call instead."""

    def method(llm: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"LLM.{name} is not here: {instead}")

    method.__name__, method.__doc__ = name, f"Raises NotImplementedError: {instead}."
    return method


LIKELIHOOD = "LLM.log_likelihood gives the log-probabilities of texts or continuations under this model"
EMBEDS = "LLM.embed gives embeddings"
WEIGHTS = "LLM.params are the weights, LLM.update_params serves others, and LLM.engine is the engine"
