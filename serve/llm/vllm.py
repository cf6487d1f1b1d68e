"""Arguments and methods of vLLM's `LLM` that duetto maps to its own, or refuses with a hint."""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn

from ...neutral_values import check_neutral
from ...refusals import ensure, quote
from ..options.engine import CHOICES


def check_vllm_arguments(**arguments: Any) -> None:
    """Raise ValueError for an argument with an effect in vLLM that duetto does not have. A list or tuple is
    checked value by value."""
    for name, value in arguments.items():
        for element in value if isinstance(value, (list, tuple)) and value else [value]:
            check_neutral("call", name, element)


def make_refused_method(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method `name` that raises NotImplementedError. The hint `instead` says what to call."""

    def method(llm: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"LLM.{name} is not here: {instead}")

    method.__name__, method.__doc__ = name, f"Raises NotImplementedError: {instead}."
    return method


LIKELIHOOD_HINT = "LLM.log_likelihood gives the log-probabilities of texts or continuations under this model"
EMBED_HINT = "LLM.embed gives embeddings"
WEIGHTS_HINT = "LLM.params are the weights, LLM.update_params serves others, and LLM.engine is the engine"


def collective_rpc(
    llm: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Call a method of vLLM's workers. `reload_weights` is `LLM.load_params`, by default of the model's own
    folder, else of `weights_path`. `update_config` may only set a load format that reads weights. Returns the
    result in a list. Raises NotImplementedError for another method."""
    calls = {"reload_weights": llm.load_params, "update_config": check_config_overrides}
    if not isinstance(method, str) or method not in calls:
        known = f"{quote(method)} is not {' or '.join(calls)}, and the engine runs without workers"
        raise NotImplementedError(f"LLM.collective_rpc is not here: {known}; {WEIGHTS_HINT}")
    keywords = dict(kwargs or {})
    if "weights_path" in keywords:
        keywords["path"] = keywords.pop("weights_path")
    return [calls[method](*args, **keywords)]


def make_compat_property(name: str) -> Any:
    """Return a cached property of `LLM`: the object `name` of duetto.compat, made at its first use. Its
    module is imported by name, since only scripts for vLLM need it."""
    module, _, kind = name.partition(":")
    return cached_property(lambda llm: getattr(import_module(f"duetto.compat.{module}"), kind)(llm))


def check_config_overrides(overrides: Any) -> None:
    """Raise ValueError unless `overrides` only sets a load format that reads weights."""
    allowed = [name for name in CHOICES["load_format"] if name != "dummy"]
    is_known = isinstance(overrides, dict) and overrides in [
        {"load_config": {"load_format": name}} for name in allowed
    ]
    ensure(
        is_known,
        f"update_config of {quote(overrides)} is not supported: only load_format, {', '.join(allowed)}",
    )
