"""The keywords of `LLM`: engine options, their former names, and the names and neutral values of vLLM."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from ...neutral_values import EFFECTLESS, NEUTRAL, check_neutral
from ...option_fields import convert_field
from ...refusals import former_name_note, unknown_name_message
from .engine import EngineOptions
from .transfer import with_transfer_options

OTHER_NAMES = {"max_num_batched_tokens": "max_prefill_tokens", "block_size": "page_size"}
FORMER_NAMES = {f.metadata["formerly"]: f.name for f in fields(EngineOptions) if "formerly" in f.metadata}
# Keywords of `LLM` itself, which an error about an unknown name may suggest.
LLM_KEYWORDS = (
    "model", "dtype", "tokenizer", "revision", "tokenizer_revision", "download_dir", "hf_token", "mesh",
    "compilation_cache",
)  # fmt: skip


def options_from_keywords(keywords: Mapping[str, Any]) -> EngineOptions:
    """Return the options of keywords; None stands for the default.

    Warns of former names. Raises TypeError for an unknown name, ValueError for a value that is not allowed.
    """
    types, options = get_type_hints(EngineOptions), {}
    for ours, (name, value) in resolve_former_names(
        with_transfer_options(keywords), OTHER_NAMES | FORMER_NAMES
    ).items():
        if ours not in types:
            check_vllm_keyword(name, value, types)
        elif value is not None:
            options[ours] = convert_field(name, value, types[ours])
    return EngineOptions(**options)


def resolve_former_names(
    values: Mapping[str, Any], names: Mapping[str, str] = FORMER_NAMES
) -> dict[str, tuple[str, Any]]:
    """Return the given name and value of each option, by its current name.

    A None under one name yields to a value under another.

    Warns of former names. Raises TypeError for an option that is given under two names.
    """
    current: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        current_name = names.get(name, name)
        if value is None and (current_name in current or name in FORMER_NAMES):
            continue
        if current.get(current_name, (name, None))[1] is not None:
            raise TypeError(f"{current_name} is given under two names: {name} is the second")
        if name in FORMER_NAMES:
            warnings.warn(former_name_note(name, current_name), FutureWarning, stacklevel=3)
        current[current_name] = name, value
    return current


def check_vllm_keyword(name: str, value: Any, options: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword, ValueError for one of vLLM's whose value is not neutral."""
    if name not in NEUTRAL["engine"] and name not in EFFECTLESS:
        raise TypeError(
            unknown_name_message(
                "option",
                name,
                [*(n for n in LLM_KEYWORDS if n != name), *sorted(options)],
                also=[*OTHER_NAMES, *NEUTRAL["engine"]],
            )
        )
    if value is not None and name in NEUTRAL["engine"]:
        check_neutral("engine", name, value)
