"""What requests ask for, as llguidance takes it."""

import json
from typing import Any

from ....sampling.structured import StructuredOutputsParams


def source(asked: StructuredOutputsParams) -> str:
    """A grammar as llguidance takes it. Raises ValueError for what is no JSON or no text."""
    try:
        return written(asked)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


def written(asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if asked.schema is not None:
        return LLMatcher.grammar_from_json_schema(asked.schema, overrides=whitespace(asked))
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        # One terminal, which costs less to follow than many rules.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(quoted, asked.choice))}")
    assert asked.grammar is not None
    return LLMatcher.grammar_from_lark(as_lark(asked.grammar))


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


def whitespace(asked: StructuredOutputsParams) -> Any:
    """llguidance's options for a JSON Schema."""
    if asked.whitespace_pattern is not None:
        return {"whitespace_pattern": asked.whitespace_pattern}
    return {"whitespace_flexible": not asked.disable_any_whitespace}
