"""A model's vocabulary as llguidance reads it: the bytes of each token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_TOKEN_BYTES = 255  # bytes of a token that a grammar may use: llguidance panics on very long ones


class TokenBytes:
    """A tokenizer with the attributes that llguidance's TokenizerWrapper reads. Each token has the bytes of
    its detokenized text. Padding of the vocabulary and tokens longer than MAX_TOKEN_BYTES have none, and are
    never allowed."""

    def __init__(self, tokenizer: Tokenizer, V: int, eos_ids: Sequence[int]):
        num_known = min(len(tokenizer), V)
        self.tokens = [drop_long_token(tokenizer.token_bytes(i)) for i in range(num_known)] + [b""] * (
            V - num_known
        )
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_ids} & {*range(V)})
        self.eos_ids = list(eos_ids)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self._tokenizer = tokenizer
        self._text_ids = {i for i, token in enumerate(self.tokens) if token} - {*self.special_token_ids}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar forces. If a token is no text, halves of the text are
        tokenized alone."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(text) < 2 or self._text_ids.issuperset(token_ids):
            return token_ids
        return [*self(text[: len(text) // 2]), *self(text[len(text) // 2 :])]


def drop_long_token(token: bytes) -> bytes:
    return token if len(token) <= MAX_TOKEN_BYTES else b""


def make_llguidance_tokenizer(token_bytes: TokenBytes) -> "llguidance.LLTokenizer":
    """Return llguidance's tokenizer. Raises ValueError without llguidance."""
    library = import_llguidance()
    with panics_as_errors():
        wrapper = library.TokenizerWrapper(token_bytes)
        return library.LLTokenizer(wrapper, n_vocab=len(token_bytes.tokens), eos_token=token_bytes.eos_ids)


def import_llguidance() -> Any:
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
