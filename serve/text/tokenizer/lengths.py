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

COMPOSED = 4  # characters that Unicode's composition (NFC) joins at most
# Pre-tokenizers that drop nothing, unless configured so.
KEEPING = ("ByteLevel", "Split", "Digits", "Punctuation", "Metaspace")


@dataclass(frozen=True)
class Measure:
    """Bound on the text of a token.

    longest: bytes or characters that a token stands for at most
    in_bytes: whether bytes are counted
    composed: characters that may become one before
    ascii_stays: whether an ASCII text is not changed by that
    spaces_vanish: whether white space may be dropped
    """

    longest: int
    in_bytes: bool
    composed: int = 1
    ascii_stays: bool = True
    spaces_vanish: bool = False

    def least_tokens(self, text: str) -> int:
        if self.spaces_vanish:
            text = "".join(text.split())
        if self.composed > 1 and not (self.ascii_stays and text.isascii()):
            units = -(-len(text) // self.composed)
        else:
            units = len(text.encode()) if self.in_bytes else len(text)
        return -(-units // self.longest)


def measure_of(backend: "tokenizers.Tokenizer") -> Measure | None:
    """Return the measure of a tokenizer; None if there is no bound."""
    from tokenizers import models

    model, normalizers = backend.model, list(parts(state(backend.normalizer)))
    splits = [part["type"] for part in parts(state(backend.pre_tokenizer)) if keeps(part)]
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if len(splits) < len(list(parts(state(backend.pre_tokenizer)))):
        return None
    in_bytes = "ByteLevel" in splits
    vocab = backend.get_vocab(with_added_tokens=False)
    needed = byte_alphabet() if in_bytes else {f"<0x{i:02X}>": i for i in range(256)}
    if not all(token in vocab for token in needed) or not (in_bytes or model.byte_fallback):
        return None
    if not all(lengthens(part, in_bytes) for part in normalizers):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    names = [token.content for token in added]
    names += [backend.normalizer.normalize_str(name) for name in names] if backend.normalizer else []
    composes = any(part["type"] == "NFC" for part in normalizers)
    return Measure(
        longest=max(*map(len, vocab), *(size(name, in_bytes) for name in names), 1),
        in_bytes=in_bytes,
        composed=COMPOSED if composes else 1,
        ascii_stays=len(normalizers) == 1,
        spaces_vanish=any(token.lstrip or token.rstrip for token in added),
    )


def state(component: Any) -> Mapping[str, Any]:
    return msgspec.json.decode(component.__getstate__()) if component else {"type": "Sequence"}


def parts(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a normalizer or pre-tokenizer, or the parts of a sequence of them."""
    if component["type"] != "Sequence":
        yield component
        return
    for part in component.get("normalizers") or component.get("pretokenizers") or ():
        yield from parts(part)


def keeps(splitter: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer leaves every character in some word."""
    return splitter["type"] in KEEPING and splitter.get("behavior") != "Removed"


def lengthens(normalizer: Mapping[str, Any], in_bytes: bool) -> bool:
    """Return whether a normalizer never makes a text shorter, except by composing characters."""
    if normalizer["type"] == "Replace":
        old, new = normalizer["pattern"].get("String"), normalizer["content"]
        return bool(old) and size(new, in_bytes) >= size(old, in_bytes)
    return normalizer["type"] in ("NFC", "Prepend")


def size(text: str, in_bytes: bool) -> int:
    return len(text.encode()) if in_bytes else len(text)
