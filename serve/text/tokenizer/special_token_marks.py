"""Special tokens in messages that are read as plain text, while those of the chat template stay special. A
mark, a character that occurs nowhere else, is put between the characters of each such token before the
template is rendered. The tokenizer finds special tokens first, and then removes the mark."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from .chats.messages import iterate_strings, map_strings

if TYPE_CHECKING:
    import tokenizers

HIDING_MARKS = "\ufdd0\ufdd1"  # Unicode noncharacters; a tokenizer is kept for each


def hide_special_tokens(value: Any, tokens: Iterable[str]) -> tuple[Any, str]:
    """Return JSON values with a mark inside the tokens in their strings, and the mark. If the strings have no
    tokens, the mark is "". Raises ValueError for strings with tokens and all HIDING_MARKS."""
    text = "\n".join(iterate_strings(value))
    words = [token for token in tokens if len(token) > 1 and token in text]
    if not words:
        return value, ""
    mark = next((mark for mark in HIDING_MARKS if mark not in text), None)
    if mark is None:
        codes = " and ".join(f"U+{ord(mark):X}" for mark in HIDING_MARKS)
        raise ValueError(f"messages hold special tokens, and {codes}: not all of them are allowed")
    return map_strings(value, lambda text: insert_mark(text, words, mark)), mark


def insert_mark(text: str, words: Iterable[str], mark: str) -> str:
    """Return a text with the mark between the characters of each of the words, which may overlap."""
    marked_positions: set[int] = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            marked_positions.update(range(at + 1, at + len(word)))
            at = text.find(word, at + 1)
    return "".join(mark + letter if i in marked_positions else letter for i, letter in enumerate(text))


def make_mark_removing_tokenizer(backend: "tokenizers.Tokenizer", mark: str) -> "tokenizers.Tokenizer":
    """Return a tokenizer that finds special tokens in a text as given, and then removes the mark."""
    from tokenizers import Tokenizer

    state = msgspec.json.decode(backend.to_str())
    for token in state["added_tokens"]:
        token["normalized"] &= not token["special"]
    removal = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
    normalizer = state["normalizer"]
    state["normalizer"] = {
        "type": "Sequence",
        "normalizers": [removal, *([normalizer] if normalizer else [])],
    }
    return Tokenizer.from_str(msgspec.json.encode(state).decode())
