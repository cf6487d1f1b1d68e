"""The keywords of `LLM`: options of ours, and the names and neutral values that scripts for vLLM give."""

from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from ...fields import converted
from ...refusals import check_neutral, unknown
from .engine import EngineOptions
from .neutral import EFFECTLESS, VALUES

OTHER_NAMES = {"max_num_batched_tokens": "max_prefill_tokens", "block_size": "page_size"}
# Those of `LLM` itself, for the nearest name of one that is unknown.
OWN = (
    "model",
    "dtype",
    "tokenizer",
    "revision",
    "tokenizer_revision",
    "download_dir",
    "hf_token",
    "mesh",
    "compilation_cache",
)


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Keywords as options; None is what it would be if it were not given.

    Raises TypeError for a name that is none, ValueError for a value that is not allowed.
    """
    types, options = get_type_hints(EngineOptions), {}
    for name, value in given.items():
        ours = OTHER_NAMES.get(name, name)
        if ours not in types:
            check_keyword(name, value, types)
        elif value is None:
            continue
        elif ours in options:
            raise TypeError(f"{ours} is given under two names: {name} is the second")
        else:
            options[ours] = converted(name, value, types[ours])
    return EngineOptions(**options)


def check_keyword(name: str, value: Any, options: Iterable[str]) -> None:
    """Raise unless a keyword for vLLM asks for nothing that is not done here."""
    if name not in VALUES and name not in EFFECTLESS:
        raise TypeError(
            unknown(
                "option",
                name,
                [*(n for n in OWN if n != name), *sorted(options)],
                also=[*OTHER_NAMES, *VALUES],
            )
        )
    if value is not None and name in VALUES:
        check_neutral(name, value, VALUES)
