"""Text in and out: the tokenizer of a model folder, and text from generated tokens with stop strings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .textstream import (
    ByteLevelStream,
    PieceStream,
    TextStream,
    WindowStream,
    byte_alphabet,
    piece_rules,
    token_bytes,
)
from .vocabularies import find_vocabulary

if TYPE_CHECKING:
    import tokenizers


class NamedTemplate(msgspec.Struct):
    """One of several templates in a `tokenizer_config.json`."""

    name: str
    template: str


class Tokenizer:
    """A folder's tokenizer through the `tokenizers` library, with what `tokenizer_config.json` adds to it.

    Attributes: bos_token, eos_token (str or None), bos_token_id, eos_token_id (int or None), chat_template (Jinja source, or
    None where the model has none).
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        config: Mapping[str, Any],
        chat_template: str | None = None,
        encode: Callable[[str, bool], list[int]] | None = None,
    ):
        """Takes over `backend`: truncation and padding are turned off, bos and eos are what `config` names.

        `encode` makes ids of a text, and of whether special tokens are added, where the backend only has the tokens.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._encode = encode or (lambda text, special: backend.encode(text, add_special_tokens=special).ids)
        self.chat_template = chat_template
        self.bos_token, self.bos_token_id = self._named(config, "bos_token")
        self.eos_token, self.eos_token_id = self._named(config, "eos_token")
        bos = self.bos_token_id if config.get("add_bos_token") else None
        self._prefix = [] if bos is None else [bos]
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = msgspec.json.decode(backend.decoder.__getstate__()) if backend.decoder else {"type": "None"}
        self._alphabet = byte_alphabet() if decoder["type"] == "ByteLevel" else None
        self._rules = piece_rules(decoder)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a folder: its `tokenizer.json`, or its SentencePiece `tokenizer.model`, or `vocab.json` with
        `merges.txt`; None if it has none of them.

        Raises ValueError, naming the file, if a file is there but cannot be read or is not supported.
        """
        folder = Path(path)
        found = find_vocabulary(folder)
        if found is None:
            return None
        return cls(found.backend, found.config, _chat_template(folder, found.config), found.encode)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The special tokens are those of tokenizer.json's post-processor; bos is added where it lacks
        one though `add_bos_token` is true (DeepSeek's folders). None are added with `add_special_tokens=False`.

        Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair, which no UTF-8 text holds.
        """
        try:
            ids = self._encode(text, add_special_tokens)
        except TypeError:
            text.encode()
            raise
        missing = add_special_tokens and ids[: len(self._prefix)] != self._prefix
        return [*self._prefix, *ids] if missing else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary are left out."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """One token's text as it stands inside a text (leading space kept, broken bytes replaced); "" for an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        if self._alphabet:
            return token_bytes(token, self._alphabet).decode("utf-8", "replace")
        if self._rules:
            stream = PieceStream(self._rules, at_start=False)
            return stream.push(token_id, token) + stream.finish()
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, which need not be whole characters."""
        token = self._backend.id_to_token(token_id)
        if token is not None and self._alphabet:
            return token_bytes(token, self._alphabet)
        byte = self._rules.byte(token) if token is not None and self._rules else None
        return self.decode_token(token_id).encode() if byte is None else bytes([byte])

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary, e.g. `<|im_end|>`; None if there is none."""
        return self._backend.token_to_id(token)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """A conversation as the model's prompt: ids, or text with `tokenize=False`. Arguments are those of Transformers.

        Raises chat.ChatTemplateError if there is no template, it refuses the messages, or they are malformed.
        """
        from .chat import apply_chat, render_for

        applied = apply_chat if tokenize else render_for
        options = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        return applied(self, messages, tools=tools, **options, **kwargs)

    def keeps(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token that decoding would use for an id; None where it leaves the id out."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        return self._backend.id_to_token(token_id)

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """A fresh text stream that continues a prompt (or begins a text, if the prompt has no text)."""
        if self._alphabet:
            return ByteLevelStream(self._alphabet)
        kept = _last(prompt_ids, 4, lambda i: self.keeps(i, skip_special_tokens) is not None)
        if self._rules:
            return PieceStream(self._rules, at_start=not kept)
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), kept)

    def _named(self, config: Mapping[str, Any], name: str) -> tuple[str | None, int | None]:
        """A token that the configuration names, and its id, made special if the vocabulary has it as a plain token."""
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None or self._backend.token_to_id(token) is None:
            return token, None
        self._backend.add_special_tokens([token])
        return token, self._backend.token_to_id(token)


class Detokenizer:
    """Text of a request's generated tokens, as they come, and the stop strings in it.

    `push` returns only text that no later token can change and that cannot be the beginning of a stop string; the pushes and
    `finish` together are the text, however the ids were divided among them. Without a stop that text is what the tokenizer
    decodes from all ids at once: after `prompt_ids`, what it adds to the prompt's text (a leading space is then kept). A
    character whose bytes begin in the prompt is not completed.

    Stop strings are looked for after every token. Reading character by character, the one that is complete first wins, of
    several ending together the longest; the text ends before it, or after it with `include_stop_str_in_output`. A stop *token*
    is the caller's business: push its id only if its text belongs to the output.

    Attributes: stop_hit (the stop string found, or None), tokens_used (ids consumed, the completing one included).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        *,
        prompt_ids: Sequence[int] = (),
    ):
        assert all(stop), "an empty stop string matches everywhere"
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = tuple(stop)
        self._include = include_stop_str_in_output
        self._stream = tokenizer.stream(prompt_ids, skip_special_tokens)
        self._pieces: list[str] = []
        self._held = ""  # the end of the final text, as far as a stop string may begin in it
        self._length = 0  # of the final text, held part included
        self._floor = 0  # a stop string must end beyond this position
        self.stop_hit: str | None = None
        self.tokens_used = 0

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._pieces)

    def push(self, ids: Iterable[int], below_min: int = 0) -> str:
        """Takes the next ids, up to the one that completes a stop string; returns the text that became certain.

        The first `below_min` of the ids are among the request's first `min_tokens`: a stop string must end beyond their text.
        """
        pieces = []
        for i, token_id in enumerate(ids):
            if self.stop_hit is not None:
                break
            self.tokens_used += 1
            token = self._tokenizer.keeps(token_id, self._skip)
            new = "" if token is None else self._stream.push(token_id, token)
            pieces.append(self._extend(new, i < below_min))
        return self._give("".join(pieces))

    def finish(self) -> str:
        """No further token comes: returns the text that was held back. Nothing is left after a stop string."""
        if self.stop_hit is not None:
            return ""
        held = "" if self._include else self._held
        self._held = ""
        return self._give(held + self._stream.finish())

    def _give(self, text: str) -> str:
        self._pieces.append(text)
        return text

    def _extend(self, new: str, below_min: bool) -> str:
        """Adds final text; returns the part of it, and of the held text, that can be given out."""
        final = self._held + new
        begin = self._length - len(self._held)
        given = len(self._held) if self._include else 0
        self._length += len(new)
        seen = final + self._stream.pending
        if below_min:
            self._floor = begin + len(seen)
        elif match := first_match(seen, self._stops, self._floor - begin):
            start, end = match
            self.stop_hit = seen[start:end]
            return seen[given : end if self._include else start]
        self._held = final[len(final) - overlap(final, self._stops) :]
        return final[given : len(final) - (0 if self._include else len(self._held))]


def first_match(text: str, stops: Sequence[str], floor: int) -> tuple[int, int] | None:
    """Start and end of the stop string that ends first beyond `floor`; of those ending together the longest."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, floor - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start))
    end, start = min(found, default=(0, 0))
    return (start, end) if end else None


def overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is a beginning, but not the whole, of a stop string."""
    best = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), best, -1):
            if text.endswith(stop[:n]):
                best = n
                break
    return best


def _last(ids: Sequence[int], count: int, keep: Callable[[int], bool]) -> list[int]:
    """The last `count` ids that are kept, in order, without looking at more of them than needed."""
    found: list[int] = []
    for token_id in reversed(ids):
        if len(found) == count:
            break
        if keep(token_id):
            found.append(token_id)
    return found[::-1]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's template: its own file, or in the configuration, there alone or as the one named "default".

    Raises ValueError for one that is no text.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    template = config.get("chat_template")
    try:
        named = msgspec.convert(template, str | list[NamedTemplate] | None)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {template!r:.80}, "
            f"expected a template, or a list of objects with name and template: {error}"
        ) from error
    return {t.name: t.template for t in named}.get("default") if isinstance(named, list) else named
