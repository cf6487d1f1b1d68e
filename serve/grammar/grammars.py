"""Grammars from what requests ask for, each compiled once."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...sampling.structured import StructuredOutputsParams
from ..text.tokenizer import Tokenizer
from .constraint import Constraint, mask_of
from .vocabulary import panics_as_errors, vocabulary

if TYPE_CHECKING:
    import llguidance

KEPT = 64  # compiled grammars that are kept, those of the latest requests
MOST_ITEMS = 10_000  # alternatives that a grammar may follow at one place: a token then takes up to 0.1 s


class Compiled(NamedTuple):
    """A grammar that has read nothing, and what it allows first."""

    matcher: "llguidance.LLMatcher"
    first: np.ndarray  # uint32 [words]


class Grammars:
    """Compiles grammars over a model's V tokens. May be called from any thread; the first request takes the
    time that the vocabulary takes, a tenth of a second for 50,000 tokens."""

    def __init__(self, tokenizer: Tokenizer, V: int, ends: Sequence[int]):
        self._tokenizer, self._V, self._ends = tokenizer, V, tuple(ends)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()

    def constraint(self, asked: StructuredOutputsParams, start: int) -> Constraint:
        """What rules an output that begins at position `start`. Raises ValueError with llguidance's reason
        where it cannot be compiled, or without llguidance."""
        with panics_as_errors(), self._lock:
            matcher, first = self._find(asked)
            return Constraint(matcher.deep_copy(), frozenset(self._ends), first, start)

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        return vocabulary(self._tokenizer, self._V, self._ends)

    def _find(self, asked: StructuredOutputsParams) -> Compiled:
        vocabulary = self._vocabulary  # before anything else is asked of the library
        text = source(asked)
        found = self._compiled.pop(text, None) or compiled(vocabulary, text)
        self._compiled[text] = found
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return found


def compiled(vocabulary: "llguidance.LLTokenizer", text: str) -> Compiled:
    """Raises ValueError where a grammar cannot be compiled, or allows nothing."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_items_in_row=MOST_ITEMS)
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
    try:
        return Compiled(matcher, mask_of(matcher))
    except ValueError as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


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
