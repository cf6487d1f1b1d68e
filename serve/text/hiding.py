"""Special tokens in the text of messages that are to be read as plain text: the chat template's own stay
special.

A mark, a character that occurs nowhere else, is put between the characters of each such token before the
template is rendered. The tokenizer finds special tokens first, and takes the mark out before anything else.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import tokenizers

PRIVATE = range(0xE100, 0xF8FF)  # characters to which Unicode gives no meaning


def hidden(value: Any, tokens: Iterable[str]) -> tuple[Any, str]:
    """JSON's values with a mark in each of the tokens in their strings, and the mark: "" where there is no
    such token."""
    words = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    if not words:
        return value, ""
    pattern = re.compile(f"(?=({'|'.join(map(re.escape, words))}))")
    strings = list(strings_in(value))
    if not any(map(pattern.search, strings)):
        return value, ""
    used = set("".join(strings))
    mark = next(chr(code) for code in PRIVATE if chr(code) not in used)
    return marked(value, pattern, mark), mark


def strings_in(value: Any) -> Iterator[str]:
    """All strings of JSON's values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from (key, *strings_in(one))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from strings_in(one)


def marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return apart(value, pattern, mark)
    if isinstance(value, dict):
        return {apart(key, pattern, mark): marked(one, pattern, mark) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(one, pattern, mark) for one in value]
    return value


def apart(text: str, pattern: re.Pattern[str], mark: str) -> str:
    """A text with the mark between the characters of each match; matches may overlap."""
    inside = {i for found in pattern.finditer(text) for i in range(found.start() + 1, found.end(1))}
    return (
        "".join(mark + letter if i in inside else letter for i, letter in enumerate(text)) if inside else text
    )


def without_mark(backend: "tokenizers.Tokenizer", mark: str) -> "tokenizers.Tokenizer":
    """A tokenizer that finds special tokens in a text as it comes, and then takes the mark out."""
    from tokenizers import Tokenizer

    state = msgspec.json.decode(backend.to_str())
    for token in state["added_tokens"]:
        token["normalized"] &= not token["special"]
    out = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
    own = state["normalizer"]
    state["normalizer"] = {"type": "Sequence", "normalizers": [out, *([own] if own else [])]}
    return Tokenizer.from_str(msgspec.json.encode(state).decode())
