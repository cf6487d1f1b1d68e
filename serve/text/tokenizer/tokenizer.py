"""A model's tokenizer, with the names of Transformers: text to token ids and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....neutral import without_neutral
from .added import content
from .hiding import without_mark
from .lengths import Measure, measure_of
from .stream import (
    ByteLevelStream,
    PieceStream,
    TextStream,
    WindowStream,
    byte_alphabet,
    piece_rules,
    token_bytes,
)
from .templates import chat_templates_of
from .vocabularies import find_vocabulary

if TYPE_CHECKING:
    import tokenizers

HELD = 4096  # characters; encoding a longer text releases the interpreter lock
Encode = Callable[[str, bool, str], list[int]]
LONG = 100_000  # characters; a shorter text is tokenized to count its tokens


def check_all_neutral(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of Transformers that asks for something, TypeError for any other."""
    if others := without_neutral("tokenizer", options):
        raise TypeError(f"unknown argument {next(iter(others))!r}")


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of a text, by key or as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """A folder's tokenizer through the `tokenizers` library, with the settings of `tokenizer_config.json`.

    bos_token, eos_token, unk_token, pad_token: str or None; pad_token may be set
    bos_token_id, eos_token_id, unk_token_id, pad_token_id: int or None
    chat_template: Jinja source, or None
    all_special_tokens, all_special_ids: those that the folder names
    special_ids: all tokens that are no text
    split_special_tokens: False, and may be set: special tokens in messages are read as plain text;
        Transformers then splits those of the template too

    `len` counts the tokens, added ones included; a model's vocabulary may be padded beyond it.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        config: Mapping[str, Any],
        chat_template: str | Mapping[str, str] | None = None,
        encode: Encode | None = None,
    ):
        """Take over `backend`: truncation and padding are turned off, bos and eos are those of `config`.
        Several chat templates are given by name; the attribute is the one called "default". `encode`, if the
        backend cannot encode, makes ids of a text, given whether special tokens are added and the mark that
        hides special tokens."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._encodes_elsewhere = encode is not None
        self._encode: Encode = encode or self._encoded
        self._marked: dict[str, tokenizers.Tokenizer] = {"": backend}  # by the mark that each removes
        self.split_special_tokens = False
        several = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self._templates: Mapping[str, str] = several or {}
        self.chat_template = self._templates.get("default")
        self.bos_token, self.bos_token_id = self._named(config, "bos_token")
        self.eos_token, self.eos_token_id = self._named(config, "eos_token")
        self.unk_token, self.pad_token = (content(config.get(name)) for name in ("unk_token", "pad_token"))
        self._others = [content(token) for token in config.get("additional_special_tokens") or ()]
        bos = self.bos_token_id if config.get("add_bos_token") else None
        self._prefix = [] if bos is None else [bos]
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = msgspec.json.decode(backend.decoder.__getstate__()) if backend.decoder else {"type": "None"}
        self._alphabet = byte_alphabet() if decoder["type"] == "ByteLevel" else None
        self._rules = piece_rules(decoder)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer | None":
        """Read the tokenizer of a folder: `tokenizer.json`, or SentencePiece's `tokenizer.model`, or
        `vocab.json` with `merges.txt`, or ranks of tiktoken or Mistral; None without any. Raises ValueError,
        naming the file, for one that cannot be read or is not supported."""
        folder = Path(path)
        found = find_vocabulary(folder)
        if found is None:
            return None
        return cls(found.backend, found.config, chat_templates_of(folder, found.config), found.encode)

    # ------------------------------------------------------------ the vocabulary

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token, as the vocabulary writes tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def unk_token_id(self) -> int | None:
        return None if self.unk_token is None else self.token_id(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.token_id(self.pad_token)

    @property
    def all_special_tokens(self) -> list[str]:
        named = (self.bos_token, self.eos_token, self.unk_token, self.pad_token, *self._others)
        return list(dict.fromkeys(token for token in named if token is not None))

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self.token_id, self.all_special_tokens)
        return [i for i in ids if i is not None]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, e.g. `<|im_end|>`; None if unknown."""
        return self._backend.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or those of several; `unk_token_id` for an unknown one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.token_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or those of several, as the vocabulary writes them; None for an unknown
        id."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        kept = (int(i) for i in ids if not (skip_special_tokens and int(i) in self.special_ids))
        return [self._backend.id_to_token(i) for i in kept]

    # ------------------------------------------------------------ text to ids

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **neutral: Any
    ) -> Encoding:
        """Return `input_ids` and `attention_mask` of a text, or lists of them for several texts. Raises
        ValueError for padding, truncation and tensors, which are not supported."""
        check_all_neutral(neutral)
        if isinstance(text, str):
            return encoding(self.encode(text, add_special_tokens))
        return encoding([self.encode(one, add_special_tokens) for one in text])

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, mark: str = ""
    ) -> list[int]:
        """Return the token ids of a text. Special tokens are those of tokenizer.json's post-processor; bos is
        added where it lacks one though `add_bos_token` is true (DeepSeek's folders). With
        `add_special_tokens=False` none are added. The `mark` in a text (see `hiding`) hides special tokens.
        Raises UnicodeEncodeError, a ValueError, for half of a surrogate pair, and ValueError for a text whose
        length alone shows that it has more than `most` tokens; a shorter text may have more, too."""
        self.check_length(text.replace(mark, ""), most)
        try:
            ids = self._encode(text, add_special_tokens, mark)
        except TypeError:
            text.encode()
            raise
        missing = add_special_tokens and ids[: len(self._prefix)] != self._prefix
        return [*self._prefix, *ids] if missing else ids

    def _encoded(self, text: str, special: bool, mark: str) -> list[int]:
        """Return the backend's ids. A long text is encoded as a batch, which lets other threads run
        meanwhile."""
        if mark not in self._marked:
            self._marked[mark] = without_mark(self._backend, mark)
        backend = self._marked[mark]
        if len(text) <= HELD:
            return backend.encode(text, add_special_tokens=special).ids
        (found,) = backend.encode_batch_fast([text], add_special_tokens=special)
        return found.ids

    def check_length(self, text: str, most: int | None) -> None:
        """Raise ValueError for a text whose length alone shows that it has more than `most` tokens."""
        if most is not None and len(text) > LONG and (least := self.least_tokens(text)) > most:
            raise ValueError(f"the prompt has {least} tokens or more, at most {most} are allowed")

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, without tokenizing it; 0 if its length gives
        none."""
        return 0 if self._measure is None else self._measure.least_tokens(text)

    @cached_property
    def _measure(self) -> Measure | None:
        return None if self._encodes_elsewhere else measure_of(self._backend)

    def template_for(self, name: str | None = None, with_tools: bool = False) -> str | None:
        """Return the chat template of a name, or the one given in its place; else the tokenizer's, of several
        named ones the one for tools if there are some."""
        if name is not None:
            return self._templates.get(name, name)
        is_own = self.chat_template == self._templates.get("default")
        return self._templates.get("tool_use" if with_tools and is_own else "", self.chat_template)

    def apply_chat_template(
        self,
        conversation: list[Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Return a conversation, or several, as the model's prompt: an Encoding, or ids with
        `return_dict=False`, or text with `tokenize=False`. Arguments are those of Transformers; others are
        variables of the template. Raises chat.ChatTemplateError if there is no template, it rejects the
        messages, or they are malformed; ValueError as a call does."""
        from .chat import render_for, rendered_ids

        options |= {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        options |= {"tools": tools}
        variables = without_neutral("tokenizer", options)
        several = isinstance(conversation, list) and conversation and isinstance(conversation[0], list)
        each = conversation if several else [conversation]
        if not tokenize:
            texts = [render_for(self, one, **variables) for one in each]
            return texts if several else texts[0]
        ids = [rendered_ids(self, one, **variables)[1] for one in each]
        found = ids if several else ids[0]
        return encoding(found) if return_dict else found

    # ------------------------------------------------------------ ids to text

    def decode(self, ids: Any, skip_special_tokens: bool = False, **neutral: Any) -> Any:
        """Return the text of token ids, or of one; ids outside the vocabulary are left out. For lists of ids,
        return a list of texts."""
        check_all_neutral(neutral)
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and not isinstance(ids[0], Integral):
            return [self.decode(one, skip_special_tokens) for one in ids]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Any], skip_special_tokens: bool = False, **neutral: Any
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens, **neutral) for ids in sequences]

    def decode_token(self, token_id: int) -> str:
        """Return a token's text as it is inside a text (leading space kept, broken bytes replaced); "" for an
        unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        if self._alphabet:
            return token_bytes(token, self._alphabet).decode("utf-8", "replace")
        if self._rules:
            stream = PieceStream(self._rules, at_start=False)
            return stream.push(token_id, token) + stream.finish()
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which need not be whole characters."""
        token = self._backend.id_to_token(token_id)
        if token is not None and self._alphabet:
            return token_bytes(token, self._alphabet)
        byte = self._rules.byte(token) if token is not None and self._rules else None
        return self.decode_token(token_id).encode() if byte is None else bytes([byte])

    def keeps(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token that decoding uses for an id; None if it leaves the id out."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        return self._backend.id_to_token(token_id)

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """Return a new text stream behind a prompt; a prompt without text begins a text."""
        if self._alphabet:
            return ByteLevelStream(self._alphabet)
        last = (i for i in reversed(prompt_ids) if self.keeps(i, skip_special_tokens) is not None)
        kept = [*islice(last, 4)][::-1]
        if self._rules:
            return PieceStream(self._rules, at_start=not kept)
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), kept)

    def _named(self, config: Mapping[str, Any], name: str) -> tuple[str | None, int | None]:
        """Return a token that the configuration names, and its id; it becomes special if it is a plain token
        of the vocabulary."""
        token = content(config.get(name))
        if token is None or self._backend.token_to_id(token) is None:
            return token, None
        self._backend.add_special_tokens([token])
        return token, self._backend.token_to_id(token)


def encoding(ids: list[Any]) -> Encoding:
    several = bool(ids) and isinstance(ids[0], list)
    mask = [[1] * len(one) for one in ids] if several else [1] * len(ids)
    return Encoding(input_ids=ids, attention_mask=mask)
