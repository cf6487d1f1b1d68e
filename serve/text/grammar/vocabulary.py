"""A model's vocabulary as llguidance reads it: the bytes of each token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

LONGEST = 255  # bytes of a token that a grammar may use: llguidance panics on very long ones


class TokenBytes:
    """The attributes that llguidance's TokenizerWrapper reads. A token has the bytes that detokenized text
    has. Padding of the model's vocabulary and tokens longer than LONGEST have none, and are never allowed."""

    def __init__(self, tokenizer: Tokenizer, V: int, ends: Sequence[int]):
        known = min(len(tokenizer), V)
        self.tokens = [within(tokenizer.token_bytes(i)) for i in range(known)] + [b""] * (V - known)
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends} & {*range(V)})
        self.ends = list(ends)
        self.eos_token_id, self.bos_token_id = ends[0], None
        self._tokenizer = tokenizer
        self._texts = {i for i, token in enumerate(self.tokens) if token} - {*self.special_token_ids}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar forces, in parts if one of them is no text."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if len(text) < 2 or self._texts.issuperset(found):
            return found
        return [*self(text[: len(text) // 2]), *self(text[len(text) // 2 :])]


def within(token: bytes) -> bytes:
    return token if len(token) <= LONGEST else b""


def vocabulary(words: TokenBytes) -> "llguidance.LLTokenizer":
    """Return llguidance's tokenizer. Raises ValueError without llguidance."""
    own = library()
    with panics_as_errors():
        wrapper = own.TokenizerWrapper(words)
        return own.LLTokenizer(wrapper, n_vocab=len(words.tokens), eos_token=words.ends)


def library() -> Any:
    """Return the module llguidance. Raises ValueError without it."""
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            f"structured_outputs is not allowed: there is no {error.name}; pip install 'duetto[structured]'"
        ) from None
    return llguidance


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic inside llguidance, which is no Exception in Python, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"structured_outputs: llguidance panicked: {error}") from None
