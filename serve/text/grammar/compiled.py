"""Grammars: from what requests ask for to compiled ones, and the cache of these."""

import json
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....sampling.structured import StructuredOutputsParams
from ..tools.json_schema import closed
from .constraint import mask_of
from .vocabulary import library, panics_as_errors

if TYPE_CHECKING:
    import llguidance

MOST_ITEMS = 10_000  # alternatives that a grammar may follow at one place: a token then takes up to 0.1 s
LIMITS: dict[str, Any] = {"max_items_in_row": MOST_ITEMS}
SPACE = (
    r"( |\r?\n( {0,20}|\t{0,10}))?"  # whitespace between JSON's tokens: none, one space, or an indented line
)
NAME = r"(?!\d+$)[0-9A-Za-z_-]+"  # names of grammars that Lark can refer to
LARGE = 8 << 20  # bytes; larger grammars are returned to the system at once


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled grammar before its first token.

    first: mask of the tokens that it allows first
    bytes: memory that it takes, copies included
    """

    matcher: "llguidance.LLMatcher"
    first: np.ndarray  # uint32 [words]
    bytes: int


def compiled(vocabulary: "llguidance.LLTokenizer", text: str, bytes: int) -> Compiled:
    """Compile a grammar. Raises ValueError for one that llguidance rejects or that allows nothing."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))
    try:
        return Compiled(matcher, mask_of(matcher), bytes)
    except ValueError as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


class GrammarCache:
    """Compiled grammars by their sources: the latest ones, as many as `most` bytes hold, and all that
    requests still use."""

    def __init__(self, most: int):
        self._most = most
        self._latest: OrderedDict[str, Compiled] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()

    @property
    def alive(self) -> int:
        """Bytes of all grammars in memory."""
        return sum(one.bytes for one in self._alive.values())

    @property
    def bytes(self) -> int:
        """Bytes of the latest grammars, which are kept."""
        return sum(one.bytes for one in self._latest.values())

    def get(self, text: str) -> Compiled | None:
        if (found := self._alive.get(text)) is not None:
            self.add(text, found)
        return found

    def add(self, text: str, new: Compiled) -> None:
        self._alive[text] = self._latest[text] = new
        self._latest.move_to_end(text)
        self.leave_room(0)

    def leave_room(self, bytes: int) -> None:
        """Drop the oldest grammars until another one of this size fits."""
        taken = self.bytes + bytes
        while self._latest and taken > self._most:
            taken -= self._latest.popitem(last=False)[1].bytes


@panics_as_errors()
def source(params: StructuredOutputsParams) -> str:
    """Return a grammar in llguidance's format, or in GBNF. Raises ValueError for invalid JSON or text, and
    without llguidance."""
    LLMatcher = library().LLMatcher
    try:
        if params.schema is not None:
            own = json.dumps(closed(json.loads(params.schema)))
            return LLMatcher.grammar_from_json_schema(own, overrides=whitespace(params))
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            # One terminal, which costs less to follow than many rules.
            choices = " | ".join(map(quoted, params.choice))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        assert params.grammar is not None
        if is_own(params.grammar):
            check_grammars(json.loads(params.grammar).get("grammars"))
            return params.grammar
        return LLMatcher.grammar_from_lark(params.grammar)  # GBNF is translated by the child process
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


def check_grammars(grammars: Any) -> None:
    """Raise ValueError for what is no list of grammars in llguidance's JSON."""
    if not isinstance(grammars, list) or not grammars:
        raise ValueError("the JSON of a grammar needs a list of grammars")
    if not all(isinstance(one, dict) for one in grammars):
        raise ValueError("each of the grammars in the JSON of a grammar is an object")


def within(lark: Callable[[str], str], params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the grammar of a Lark text that refers to another grammar, by the name that `lark` is given.
    Raises ValueError as `source` does."""
    text = source(params)
    own, *others = json.loads(text)["grammars"] if is_own(text) else [{"lark_grammar": text}]
    name = own.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):  # then no grammar refers to it
        taken = {str(one.get("name")) for one in others}
        name = next(free for i in range(len(others) + 1) if (free := f"answer{i or ''}") not in taken)
    whole = [{"lark_grammar": lark(name)}, {**own, "name": name}, *others]
    return StructuredOutputsParams(grammar=json.dumps({"grammars": whole}))


def is_own(grammar: str) -> bool:
    """True for llguidance's own format of JSON, as which no Lark begins."""
    return grammar.lstrip().startswith("{")


def whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for the whitespace between JSON's tokens, which has a bound by default:
    small models would fill an answer with it."""
    if params.disable_any_whitespace and params.whitespace_pattern is None:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": params.whitespace_pattern or SPACE}


def quoted(text: str) -> str:
    """Return a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
