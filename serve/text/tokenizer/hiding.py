"""Special tokens in messages that are read as plain text, while those of the chat template stay special. A
mark, a character that occurs nowhere else, is put between the characters of each such token before the
template is rendered. The tokenizer finds special tokens first, and then removes the mark."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import tokenizers

MARKS = "\ufdd0\ufdd1"  # Unicode noncharacters; a tokenizer is kept for each


def hidden(value: Any, tokens: Iterable[str]) -> tuple[Any, str]:
    """Return JSON values with a mark inside the tokens in their strings, and the mark: "" without such
    tokens. Raises ValueError for strings with tokens and all MARKS."""
    text = "\n".join(strings_in(value))
    words = [token for token in tokens if len(token) > 1 and token in text]
    if not words:
        return value, ""
    mark = next((mark for mark in MARKS if mark not in text), None)
    if mark is None:
        codes = " and ".join(f"U+{ord(mark):X}" for mark in MARKS)
        raise ValueError(f"messages hold special tokens, and {codes}: not all of them are allowed")
    return each_string(value, lambda text: apart(text, words, mark)), mark


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings of JSON values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from strings_in(one)


def each_string(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON values with each string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): each_string(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_string(one, change) for one in value]
    return value


def apart(text: str, words: Iterable[str], mark: str) -> str:
    """Return a text with the mark between the characters of each of the words, which may overlap."""
    inside: set[int] = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            inside.update(range(at + 1, at + len(word)))
            at = text.find(word, at + 1)
    return "".join(mark + letter if i in inside else letter for i, letter in enumerate(text))


def without_mark(backend: "tokenizers.Tokenizer", mark: str) -> "tokenizers.Tokenizer":
    """Return a tokenizer that finds special tokens in a text as given, and then removes the mark."""
    from tokenizers import Tokenizer

    state = msgspec.json.decode(backend.to_str())
    for token in state["added_tokens"]:
        token["normalized"] &= not token["special"]
    out = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
    own = state["normalizer"]
    state["normalizer"] = {"type": "Sequence", "normalizers": [out, *([own] if own else [])]}
    return Tokenizer.from_str(msgspec.json.encode(state).decode())
