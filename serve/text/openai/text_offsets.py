"""Offsets of tokens in the text of a completion and of its prompt, in characters."""

from collections.abc import Iterable, Sequence

from ..tokenizer.stream import REPLACEMENT
from ..tokenizer.tokenizer import Tokenizer


class TextOffsets:
    """Counter of the characters before each token, as tokens arrive behind a prompt. A token inside a
    character has the offset of this character. Without a tokenizer all offsets are `start`."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        start: int = 0,
    ):
        self._tokenizer, self._skip_special_tokens, self._length = tokenizer, skip_special_tokens, start
        self._stream = None if tokenizer is None else tokenizer.make_stream(prompt_ids, skip_special_tokens)

    def push(self, ids: Iterable[int]) -> list[int]:
        """Add token ids, and return the offset of each."""
        return [self._push_token(i) for i in ids]

    def _push_token(self, token_id: int) -> int:
        if self._tokenizer is None or self._stream is None:
            return self._length
        before = self._length + len(self._stream.pending)
        token = self._tokenizer.token_to_decode(token_id, self._skip_special_tokens)
        if token is None:
            return before
        self._length += len(self._stream.push(token_id, token))
        text = self._tokenizer.decode_token(token_id).rstrip(REPLACEMENT)
        if not text or text.startswith(REPLACEMENT):
            return before
        # Behind a broken character, which has become text only with this token.
        return max(before, self._length + len(self._stream.pending) - len(text))


def prompt_offsets(tokenizer: Tokenizer | None, text: str, ids: Sequence[int]) -> list[int]:
    """Return the offset of each token of a prompt in its text. The text lacks special tokens that were
    added."""
    decoded = "" if tokenizer is None else tokenizer.decode(ids)
    start = max(0, decoded.find(text))
    offsets = TextOffsets(tokenizer, skip_special_tokens=False).push(ids)
    return [min(max(offset - start, 0), len(text)) for offset in offsets]
