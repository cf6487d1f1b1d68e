"""What requests ask for, as llguidance takes it."""

import json
from typing import Any

from ....sampling.structured import StructuredOutputsParams


def source(params: StructuredOutputsParams) -> str:
    """A grammar as llguidance takes it. Raises ValueError for what is no JSON or no text."""
    try:
        return written(params)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


def written(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.schema is not None:
        return LLMatcher.grammar_from_json_schema(params.schema, overrides=whitespace(params))
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # One terminal, which costs less to follow than many rules.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, params.choice))}")
    assert params.grammar is not None
    return LLMatcher.grammar_from_lark(as_lark(params.grammar))


def as_lark(text: str) -> str:
    """A grammar in Lark, translated where it is in GBNF, llama.cpp's notation. Raises ValueError for a wrong
    one."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text) if "::=" in text else text
    except Exception as error:  # noqa: BLE001 - not all that the converter raises has a kind of its own
        raise ValueError(str(error)) from None


def quoted(text: str) -> str:
    """A text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def whitespace(params: StructuredOutputsParams) -> Any:
    """llguidance's options for a JSON Schema."""
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    return {"whitespace_flexible": not params.disable_any_whitespace}
