"""Lower bounds of a text's number of tokens by its length: a prompt that is far too long is rejected without
being tokenized. No token stands for more text than its own name is long. That holds if every character
becomes part of some token, as with byte-level pairs and with vocabularies that have a token for each byte.
For tokenizers that may drop or join characters there is no bound."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .stream import byte_alphabet

if TYPE_CHECKING:
    import tokenizers

MAX_COMPOSED_CHARS = 4  # characters that Unicode's composition (NFC) joins at most
# Pre-tokenizers that drop nothing, unless configured so.
LOSSLESS_SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace")


@dataclass(frozen=True)
class TokenLengthBound:
    """Bound on the length of the text that a token stands for.

    max_token_size: maximal length of a token's text, in bytes or characters
    counts_bytes: whether lengths are in bytes
    max_composed: characters that normalisation may compose to one
    keeps_ascii: whether normalisation leaves ASCII text unchanged
    drops_spaces: whether white space may be dropped
    """

    max_token_size: int
    counts_bytes: bool
    max_composed: int = 1
    keeps_ascii: bool = True
    drops_spaces: bool = False

    def min_num_tokens(self, text: str) -> int:
        if self.drops_spaces:
            text = "".join(text.split())
        if self.max_composed > 1 and not (self.keeps_ascii and text.isascii()):
            units = -(-len(text) // self.max_composed)
        else:
            units = len(text.encode()) if self.counts_bytes else len(text)
        return -(-units // self.max_token_size)


def find_token_length_bound(backend: "tokenizers.Tokenizer") -> TokenLengthBound | None:
    """Return the bound of a tokenizer; None if it has none."""
    from tokenizers import models

    model, normalizers = backend.model, list(component_parts(component_state(backend.normalizer)))
    splits = [
        part["type"] for part in component_parts(component_state(backend.pre_tokenizer)) if is_lossless(part)
    ]
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if len(splits) < len(list(component_parts(component_state(backend.pre_tokenizer)))):
        return None
    counts_bytes = "ByteLevel" in splits
    vocab = backend.get_vocab(with_added_tokens=False)
    needed_tokens = byte_alphabet() if counts_bytes else {f"<0x{i:02X}>": i for i in range(256)}
    if not all(token in vocab for token in needed_tokens) or not (counts_bytes or model.byte_fallback):
        return None
    if not all(can_only_lengthen(part, counts_bytes) for part in normalizers):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    names = [token.content for token in added]
    names += [backend.normalizer.normalize_str(name) for name in names] if backend.normalizer else []
    composes = any(part["type"] == "NFC" for part in normalizers)
    return TokenLengthBound(
        max_token_size=max(*map(len, vocab), *(text_size(name, counts_bytes) for name in names), 1),
        counts_bytes=counts_bytes,
        max_composed=MAX_COMPOSED_CHARS if composes else 1,
        keeps_ascii=len(normalizers) == 1,
        drops_spaces=any(token.lstrip or token.rstrip for token in added),
    )


def component_state(component: Any) -> Mapping[str, Any]:
    return msgspec.json.decode(component.__getstate__()) if component else {"type": "Sequence"}


def component_parts(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer or pre-tokenizer, or the parts of a sequence of them."""
    if component["type"] != "Sequence":
        yield component
        return
    for part in component.get("normalizers") or component.get("pretokenizers") or ():
        yield from component_parts(part)


def is_lossless(splitter: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer leaves every character in some word."""
    return splitter["type"] in LOSSLESS_SPLITTERS and splitter.get("behavior") != "Removed"


def can_only_lengthen(normalizer: Mapping[str, Any], counts_bytes: bool) -> bool:
    """Return whether a normalizer never makes a text shorter, except by composing characters."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return bool(old) and text_size(new, counts_bytes) >= text_size(old, counts_bytes)
    return normalizer["type"] in ("NFC", "Prepend")


def text_size(text: str, counts_bytes: bool) -> int:
    return len(text.encode()) if counts_bytes else len(text)
