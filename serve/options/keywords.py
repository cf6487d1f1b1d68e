"""The keywords of `LLM`: engine options, their former names, and the names and neutral values of vLLM."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from ...fields import converted
from ...neutral import EFFECTLESS, NEUTRAL, check_neutral
from ...refusals import renamed, unknown
from .engine import EngineOptions
from .transfer import with_transfer

OTHER_NAMES = {"max_num_batched_tokens": "max_prefill_tokens", "block_size": "page_size"}
FORMER = {f.metadata["formerly"]: f.name for f in fields(EngineOptions) if "formerly" in f.metadata}
# Keywords of `LLM` itself, which an error about an unknown name may suggest.
OWN = (
    "model", "dtype", "tokenizer", "revision", "tokenizer_revision", "download_dir", "hf_token", "mesh",
    "compilation_cache",
)  # fmt: skip


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Return keywords as options; None is the default.

    Warns of former names. Raises TypeError for an unknown name, ValueError for a value that is not allowed.
    """
    types, options = get_type_hints(EngineOptions), {}
    for ours, (name, value) in current_names(with_transfer(given), OTHER_NAMES | FORMER).items():
        if ours not in types:
            check_keyword(name, value, types)
        elif value is not None:
            options[ours] = converted(name, value, types[ours])
    return EngineOptions(**options)


def current_names(values: Mapping[str, Any], names: Mapping[str, str] = FORMER) -> dict[str, tuple[str, Any]]:
    """Return names and values of options by the options' current names; None counts if nothing else is given.

    Warns of former names. Raises TypeError for an option that is given under two names.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        ours = names.get(name, name)
        if value is None and (ours in found or name in FORMER):
            continue
        if found.get(ours, (name, None))[1] is not None:
            raise TypeError(f"{ours} is given under two names: {name} is the second")
        if name in FORMER:
            warnings.warn(renamed(name, ours), FutureWarning, stacklevel=3)
        found[ours] = name, value
    return found


def check_keyword(name: str, value: Any, options: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword, ValueError for one of vLLM's whose value is not neutral."""
    if name not in NEUTRAL["engine"] and name not in EFFECTLESS:
        raise TypeError(
            unknown(
                "option",
                name,
                [*(n for n in OWN if n != name), *sorted(options)],
                also=[*OTHER_NAMES, *NEUTRAL["engine"]],
            )
        )
    if value is not None and name in NEUTRAL["engine"]:
        check_neutral("engine", name, value)
