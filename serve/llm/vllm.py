"""Arguments and methods of vLLM's `LLM`: those that are mapped to others here, and those that are refused,
with what to use instead."""

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn

from ...neutral import check_neutral
from ...refusals import require, shown
from ..options.engine import CHOICES


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


def collective_rpc(
    llm: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Call a method of vLLM's workers: `reload_weights` is `load_params`, of the model's own folder unless
    `weights_path` is another; `update_config` may name how weights are read. Returns the results of the one
    process. Raises NotImplementedError for another method."""
    calls = {"reload_weights": llm.load_params, "update_config": check_load_format}
    if not isinstance(method, str) or method not in calls:
        known = f"{shown(method)} is not {' or '.join(calls)}, and the engine runs without workers"
        raise NotImplementedError(f"LLM.collective_rpc is not here: {known}; {WEIGHTS}")
    given = dict(kwargs or {})
    if "weights_path" in given:
        given["path"] = given.pop("weights_path")
    return [calls[method](*args, **given)]


def of_compat(name: str) -> Any:
    """Return an attribute of `LLM`: an object of duetto.compat, made of the LLM at its first use. Its module
    is imported by name, since only scripts for vLLM need it."""
    module, _, kind = name.partition(":")
    return cached_property(lambda llm: getattr(import_module(f"duetto.compat.{module}"), kind)(llm))


def check_load_format(overrides: Any) -> None:
    """Raise ValueError for other changes of a configuration than to a load format that reads weights."""
    allowed = [name for name in CHOICES["load_format"] if name != "dummy"]
    is_known = isinstance(overrides, dict) and overrides in [
        {"load_config": {"load_format": name}} for name in allowed
    ]
    require(
        is_known,
        f"update_config of {shown(overrides)} is not supported: only load_format, {', '.join(allowed)}",
    )
