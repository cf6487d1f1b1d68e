"""Grammars in llguidance's notation, their compilation, and the cache of compiled grammars."""

import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....sampling.structured import StructuredOutputsParams
from ..tools.lark import quote_json
from ..tools.schemas.exact_schema import adapt_schema
from ..tools.schemas.json_schema import close_objects
from .constraint import next_token_mask
from .vocabulary import import_llguidance, panics_as_errors

if TYPE_CHECKING:
    import llguidance

MAX_ITEMS = 10_000  # alternatives that a grammar may follow at one place: a token then takes up to 0.1 s
PARSER_LIMITS: dict[str, Any] = {"max_items_in_row": MAX_ITEMS}
# Whitespace between JSON's tokens: none, one space, or an indented line.
WHITESPACE_PATTERN = r"( |\r?\n( {0,20}|\t{0,10}))?"
GRAMMAR_NAME_PATTERN = r"(?!\d+$)[0-9A-Za-z_-]+"  # names of grammars that Lark can refer to
LARGE_BYTES = 8 << 20  # bytes; larger grammars are returned to the system at once


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A compiled grammar before its first token.

    matcher: state of llguidance, which each request copies
    first_mask: mask of the tokens that it allows first
    bytes: memory that it takes, copies included
    """

    matcher: "llguidance.LLMatcher"
    first_mask: np.ndarray  # uint32 [words]
    bytes: int


def compile_grammar(vocabulary: "llguidance.LLTokenizer", text: str, bytes: int) -> CompiledGrammar:
    """Compile a grammar. Raises ValueError for one that llguidance rejects or that allows nothing."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    try:
        return CompiledGrammar(matcher, next_token_mask(matcher), bytes)
    except ValueError as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


class GrammarCache:
    """Compiled grammars by source: the latest ones up to `max_bytes` bytes, and all that requests still
    use."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._latest: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()

    @property
    def alive_bytes(self) -> int:
        """Bytes of all grammars in memory."""
        return sum(grammar.bytes for grammar in self._alive.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes of the latest grammars, which stay in the cache without a request that uses them."""
        return sum(grammar.bytes for grammar in self._latest.values())

    def get(self, text: str) -> CompiledGrammar | None:
        if (grammar := self._alive.get(text)) is not None:
            self.add(text, grammar)
        return grammar

    def add(self, text: str, grammar: CompiledGrammar) -> None:
        self._alive[text] = self._latest[text] = grammar
        self._latest.move_to_end(text)
        self.evict_for(0)

    def evict_for(self, bytes: int) -> None:
        """Drop the oldest grammars until `bytes` more bytes fit."""
        taken = self.cached_bytes + bytes
        while self._latest and taken > self._max_bytes:
            taken -= self._latest.popitem(last=False)[1].bytes


@panics_as_errors()
def grammar_source(params: StructuredOutputsParams) -> str:
    """Return a grammar in llguidance's format, or in GBNF. Raises ValueError for invalid JSON or text, and
    without llguidance."""
    LLMatcher = import_llguidance().LLMatcher
    try:
        if (json_schema := params.schema) is not None:
            schema = close_objects(json_schema)
            options = whitespace_options(params) | adapt_schema(schema)
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            # One terminal, which costs less to follow than many rules.
            choices = " | ".join(map(quote_json, params.choice))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        assert params.grammar is not None
        if is_llguidance_json(params.grammar):
            check_grammar_list(json.loads(params.grammar).get("grammars"))
            return params.grammar
        return LLMatcher.grammar_from_lark(params.grammar)  # GBNF is translated by the child process
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


def check_grammar_list(grammars: Any) -> None:
    """Check the list of grammars in llguidance's JSON. Raises ValueError for anything else."""
    if not isinstance(grammars, list) or not grammars:
        raise ValueError("the JSON of a grammar needs a list of grammars")
    if not all(isinstance(grammar, dict) for grammar in grammars):
        raise ValueError("each of the grammars in the JSON of a grammar is an object")


def wrap_grammar(lark: Callable[[str], str], params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return a grammar of Lark text around the grammar of `params`. `lark` makes the text from the name of
    the inner grammar. Raises ValueError as `grammar_source` does."""
    text = grammar_source(params)
    grammar, *others = json.loads(text)["grammars"] if is_llguidance_json(text) else [{"lark_grammar": text}]
    name = grammar.get("name")
    # No grammar refers to another name.
    if not isinstance(name, str) or not re.fullmatch(GRAMMAR_NAME_PATTERN, name):
        taken = {str(entry.get("name")) for entry in others}
        name = next(free for i in range(len(others) + 1) if (free := f"answer{i or ''}") not in taken)
    whole = [{"lark_grammar": lark(name)}, {**grammar, "name": name}, *others]
    return StructuredOutputsParams(grammar=json.dumps({"grammars": whole}))


def is_llguidance_json(grammar: str) -> bool:
    """Return whether a grammar is in llguidance's JSON; no Lark begins with a brace."""
    return grammar.lstrip().startswith("{")


def whitespace_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for the whitespace between JSON's tokens, which has a bound by default:
    small models would fill an answer with it."""
    if params.disable_any_whitespace and params.whitespace_pattern is None:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or WHITESPACE_PATTERN}
