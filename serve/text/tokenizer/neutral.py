"""Keywords of Transformers' tokenizers that are taken where they ask for nothing."""

from collections.abc import Mapping
from typing import Any

from ....refusals import Table, check_neutral

NEUTRAL: Table = {
    "text_pair": (None,),
    "padding": (False, None, "do_not_pad"),
    "truncation": (False, None, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_attention_mask": (True, None),
    "return_assistant_tokens_mask": (False,),
    "tokenizer_kwargs": (None, {}),
    "clean_up_tokenization_spaces": (False, None),
}


def refuse(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are none of Transformers' own. Raises ValueError for one of those that asks for
    something.
    """
    for name, value in options.items():
        if name in NEUTRAL:
            check_neutral(name, value, NEUTRAL)
    return {name: value for name, value in options.items() if name not in NEUTRAL}


def refuse_all(options: Mapping[str, Any]) -> None:
    """Raises as `refuse`, and TypeError for an option that Transformers does not have."""
    others = refuse(options)
    if others:
        raise TypeError(f"unknown argument {next(iter(others))!r}")
