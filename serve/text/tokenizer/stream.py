"""Text from tokens one by one, for each kind of decoder. Decoding a prefix gives no prefix of the whole text:
a character's bytes may lie in several tokens, and byte-fallback tokenizers replace a whole run of byte tokens
if a later byte makes it invalid. A stream returns text only when it is final. The byte-level alphabet is
GPT-2's (Radford et al., 2019); runs and replacements follow the `tokenizers` library."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_BROKEN_TOKENS = 8  # tokens a window waits for a broken character: UTF-8 never needs more than four


class TextStream(Protocol):
    """The state of a decoder between two tokens. `pending` is text that a later token may still change."""

    @property
    def pending(self) -> str: ...

    def push(self, token_id: int, token: str) -> str:
        """Take the next token; return the text that became final with it."""
        ...

    def finish(self) -> str:
        """End the text: return the rest of it, with broken characters replaced."""
        ...


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary: printable characters stand for
    themselves, the rest begins at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class ByteLevelStream:
    """Every token is bytes; together they are UTF-8, with invalid parts replaced (GPT-2, Llama 3, Qwen)."""

    pending = ""

    def __init__(self, alphabet: dict[str, int]):
        self._alphabet = alphabet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(byte_level_bytes(token, self._alphabet))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level token; an added token with a character outside the alphabet is
    UTF-8."""
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:
        return token.encode()


@dataclass(frozen=True)
class PieceRules:
    """Rules by which SentencePiece-like tokens become text: replacements, byte tokens, leading characters
    dropped."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0

    def apply_replacements(self, token: str) -> str:
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token

    def fallback_byte(self, text: str) -> int | None:
        """Return the byte of a token like `<0x0A>`; None for other tokens."""
        if not (self.byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">")):
            return None
        try:
            return int(text[3:5], 16)
        except ValueError:
            return None


class PieceStream:
    """Tokens are text, some are single bytes (Llama 2, Mistral, Gemma, Phi-3). A run of byte tokens is UTF-8
    as a whole or, with one invalid byte anywhere, replaced byte by byte: so it is pending until it ends or is
    invalid."""

    def __init__(self, rules: PieceRules, at_start: bool):
        self._rules = rules
        self._strip_left = rules.strip_count if at_start else 0
        self._begin_run()

    def _begin_run(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._run, self._run_bytes, self._is_broken = "", 0, False

    @property
    def pending(self) -> str:
        return self._strip(self._run)[0]

    def push(self, token_id: int, token: str) -> str:
        text = self._rules.apply_replacements(token)
        byte = self._rules.fallback_byte(text)
        if byte is None:
            return self._strip_final(self._end_run() + text)
        return self._strip_final(self._push_byte(byte))

    def finish(self) -> str:
        return self._strip_final(self._end_run())

    def _push_byte(self, byte: int) -> str:
        self._run_bytes += 1
        if self._is_broken:
            return REPLACEMENT
        try:
            self._run += self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run, self._is_broken = "", True
            return REPLACEMENT * self._run_bytes
        return ""

    def _end_run(self) -> str:
        incomplete = not self._is_broken and self._utf8.getstate()[0]
        text = REPLACEMENT * self._run_bytes if incomplete else self._run
        self._begin_run()
        return text

    def _strip_final(self, text: str) -> str:
        text, self._strip_left = self._strip(text)
        return text

    def _strip(self, text: str) -> tuple[str, int]:
        left = self._strip_left
        while left and text.startswith(self._rules.strip):
            text, left = text[1:], left - 1
        return text, 0 if text else left


class WindowStream:
    """Any other decoder: decodes a few last tokens, and subtracts the text already returned, as Hugging
    Face's text-generation-inference does. Exact if a token's text depends on its predecessor alone."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]):
        self._decode = decode
        self._ids = list(prompt_ids)
        self._num_known = len(self._ids)

    pending = ""

    def push(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_known < MAX_BROKEN_TOKENS:
            return ""
        self._ids = self._ids[self._num_known :] if text else self._ids
        self._num_known = len(self._ids)
        return text

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        known = self._decode(self._ids[: self._num_known])
        whole = self._decode(self._ids)
        return whole[len(known) :] if whole.startswith(known) else whole[len(known.rstrip(REPLACEMENT)) :]


def parse_piece_rules(decoder: dict[str, Any]) -> PieceRules | None:
    """Return the rules of a `tokenizers` decoder in JSON; None for one of another kind."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    count = len([k for k in kinds if k == "Replace"])
    order = ["Replace"] * count + [k for k in ("ByteFallback", "Fuse", "Strip") if k in kinds]
    plain = all("String" in step["pattern"] for step in steps[:count] if step["type"] == "Replace")
    if kinds != order or "Fuse" not in kinds or not plain:
        return None
    replacements = tuple((step["pattern"]["String"], step["content"]) for step in steps[:count])
    strip = steps[-1] if kinds[-1] == "Strip" else {"content": "", "start": 0, "stop": 0}
    if strip["stop"]:
        return None
    return PieceRules(replacements, "ByteFallback" in kinds, strip["content"], strip["start"])
