"""A model's tokenizer, with the names of Transformers: text to token ids and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....neutral_values import drop_neutral
from .added_tokens import list_special_tokens, make_added_token, token_content
from .length_bounds import TokenLengthBound, find_token_length_bound
from .special_token_marks import make_mark_removing_tokenizer
from .stream import (
    ByteLevelStream,
    PieceStream,
    TextStream,
    WindowStream,
    byte_alphabet,
    byte_level_bytes,
    parse_piece_rules,
)
from .template_files import read_chat_templates
from .vocabularies import read_vocabulary

if TYPE_CHECKING:
    import tokenizers

MAX_UNBATCHED_CHARS = 4096  # characters; encoding a longer text releases the interpreter lock
Encode = Callable[[str, bool, str], list[int]]
MIN_CHECKED_CHARS = 100_000  # characters; a shorter text is tokenized to count its tokens


def check_neutral_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of Transformers that asks for something, TypeError for any other."""
    if others := drop_neutral("tokenizer", options):
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
    all_special_tokens, all_special_ids: special tokens that the folder names
    special_ids: ids of all special tokens
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
        """Take over `backend`: turn off truncation and padding, and take bos and eos from `config`.

        `chat_template` may be several templates by name; "default" becomes the attribute. `encode` encodes in
        place of the backend. It gets a text, whether to add special tokens, and the mark that hides special
        tokens.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._encodes_elsewhere = encode is not None
        self._encode: Encode = encode or self._encode_with_backend
        # Backends by the mark that each removes.
        self._backend_by_mark: dict[str, tokenizers.Tokenizer] = {"": backend}
        self.split_special_tokens = False
        several = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self._template_by_name: Mapping[str, str] = several or {}
        self.chat_template = self._template_by_name.get("default")
        self.bos_token, self.bos_token_id = self._register_special_token(config, "bos_token")
        self.eos_token, self.eos_token_id = self._register_special_token(config, "eos_token")
        self.unk_token, self.pad_token = (
            token_content(config.get(name)) for name in ("unk_token", "pad_token")
        )
        self._other_special_tokens = [token_content(token) for token in list_special_tokens(config)]
        bos = self.bos_token_id if config.get("add_bos_token") else None
        self._prefix_ids = [] if bos is None else [bos]
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = msgspec.json.decode(backend.decoder.__getstate__()) if backend.decoder else {"type": "None"}
        self._alphabet = byte_alphabet() if decoder["type"] == "ByteLevel" else None
        self._piece_rules = parse_piece_rules(decoder)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer | None":
        """Read the tokenizer of a folder: `tokenizer.json`, or SentencePiece's `tokenizer.model`, or
        `vocab.json` with `merges.txt`, or ranks of tiktoken or Mistral; None without any. Raises ValueError,
        naming the file, for one that cannot be read or is not supported."""
        folder = Path(path)
        vocabulary = read_vocabulary(folder)
        if vocabulary is None:
            return None
        return cls(
            vocabulary.backend,
            vocabulary.config,
            read_chat_templates(folder, vocabulary.config),
            vocabulary.encode,
        )

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
        tokens = (self.bos_token, self.eos_token, self.unk_token, self.pad_token, *self._other_special_tokens)
        return list(dict.fromkeys(token for token in tokens if token is not None))

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self.token_id, self.all_special_tokens)
        return [i for i in ids if i is not None]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, e.g. `<|im_end|>`; None if unknown."""
        return self._backend.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or a list of ids for several tokens; `unk_token_id` for an unknown
        one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.token_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or a list of tokens for several ids, as the vocabulary writes them. An
        unknown id has None."""
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
        check_neutral_options(neutral)
        if isinstance(text, str):
            return make_encoding(self.encode(text, add_special_tokens))
        return make_encoding([self.encode(item, add_special_tokens) for item in text])

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None, mark: str = ""
    ) -> list[int]:
        """Return the token ids of a text.

        With `add_special_tokens` the post-processor of `tokenizer.json` adds special tokens. bos is added if
        the post-processor lacks it though `add_bos_token` is true (DeepSeek's folders). The `mark` in a text
        hides special tokens (see `special_token_marks`). Raises UnicodeEncodeError, a ValueError, for half of
        a surrogate pair. Raises ValueError for a text whose length alone shows that it has more than
        `max_tokens` tokens; a shorter text may have more, too.
        """
        self.check_length(text.replace(mark, ""), max_tokens)
        try:
            ids = self._encode(text, add_special_tokens, mark)
        except TypeError:
            text.encode()
            raise
        missing = add_special_tokens and ids[: len(self._prefix_ids)] != self._prefix_ids
        return [*self._prefix_ids, *ids] if missing else ids

    def _encode_with_backend(self, text: str, special: bool, mark: str) -> list[int]:
        """Return the backend's ids. A long text is encoded as a batch, which lets other threads run
        meanwhile."""
        if mark not in self._backend_by_mark:
            self._backend_by_mark[mark] = make_mark_removing_tokenizer(self._backend, mark)
        backend = self._backend_by_mark[mark]
        if len(text) <= MAX_UNBATCHED_CHARS:
            return backend.encode(text, add_special_tokens=special).ids
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise ValueError for a text whose length alone shows that it has more than `max_tokens` tokens."""
        if (
            max_tokens is not None
            and len(text) > MIN_CHECKED_CHARS
            and (num_tokens := self.min_num_tokens(text)) > max_tokens
        ):
            raise ValueError(f"the prompt has {num_tokens} tokens or more, at most {max_tokens} are allowed")

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, without tokenizing it; 0 if its length gives
        none."""
        return 0 if self._token_length_bound is None else self._token_length_bound.min_num_tokens(text)

    @cached_property
    def _token_length_bound(self) -> TokenLengthBound | None:
        return None if self._encodes_elsewhere else find_token_length_bound(self._backend)

    def get_chat_template(self, name: str | None = None, with_tools: bool = False) -> str | None:
        """Return the chat template of a name, or `name` itself if no template has this name. Without a name,
        return the tokenizer's template, or its template for tools with `with_tools`."""
        if name is not None:
            return self._template_by_name.get(name, name)
        is_own = self.chat_template == self._template_by_name.get("default")
        return self._template_by_name.get("tool_use" if with_tools and is_own else "", self.chat_template)

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
        """Return a conversation, or several, as the model's prompt, with the arguments of Transformers.

        The prompt is an Encoding, or ids with `return_dict=False`, or text with `tokenize=False`. Further
        arguments are variables of the template. Raises chat.ChatTemplateError for malformed messages, for
        messages that the template rejects, and without a template; ValueError as a call does.
        """
        from .chats.chat import render_and_tokenize, render_with_tokenizer

        options |= {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt}
        options |= {"tools": tools}
        variables = drop_neutral("tokenizer", options)
        is_batch = isinstance(conversation, list) and conversation and isinstance(conversation[0], list)
        conversations = conversation if is_batch else [conversation]
        if not tokenize:
            texts = [render_with_tokenizer(self, messages, **variables) for messages in conversations]
            return texts if is_batch else texts[0]
        ids = [render_and_tokenize(self, messages, **variables)[1] for messages in conversations]
        result = ids if is_batch else ids[0]
        return make_encoding(result) if return_dict else result

    # ------------------------------------------------------------ ids to text

    def decode(self, ids: Any, skip_special_tokens: bool = False, **neutral: Any) -> Any:
        """Return the text of token ids, or of one; ids outside the vocabulary are left out. For lists of ids,
        return a list of texts."""
        check_neutral_options(neutral)
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        if ids and not isinstance(ids[0], Integral):
            return [self.decode(row, skip_special_tokens) for row in ids]
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
            return byte_level_bytes(token, self._alphabet).decode("utf-8", "replace")
        if self._piece_rules:
            stream = PieceStream(self._piece_rules, at_start=False)
            return stream.push(token_id, token) + stream.finish()
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which need not be whole characters."""
        token = self._backend.id_to_token(token_id)
        if token is not None and self._alphabet:
            return byte_level_bytes(token, self._alphabet)
        byte = self._piece_rules.fallback_byte(token) if token is not None and self._piece_rules else None
        return self.decode_token(token_id).encode() if byte is None else bytes([byte])

    def token_to_decode(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """Return the token that decoding uses for an id; None if it leaves the id out."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        return self._backend.id_to_token(token_id)

    def make_stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """Return a new text stream behind a prompt; a prompt without text begins a text."""
        if self._alphabet:
            return ByteLevelStream(self._alphabet)
        last = (i for i in reversed(prompt_ids) if self.token_to_decode(i, skip_special_tokens) is not None)
        kept = [*islice(last, 4)][::-1]
        if self._piece_rules:
            return PieceStream(self._piece_rules, at_start=not kept)
        return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), kept)

    def _register_special_token(self, config: Mapping[str, Any], name: str) -> tuple[str | None, int | None]:
        """Return a token that the configuration names, and its id; it becomes special if it is a plain token
        of the vocabulary."""
        token = token_content(config.get(name))
        token_id = None if token is None else self._backend.token_to_id(token)
        if token is None or token_id is None:
            return token, None
        added = self._backend.get_added_tokens_decoder()
        if token_id not in added or not added[token_id].special:
            self._backend.add_special_tokens([make_added_token(config[name], True)])
        return token, self._backend.token_to_id(token)


def make_encoding(ids: list[Any]) -> Encoding:
    is_batch = bool(ids) and isinstance(ids[0], list)
    mask = [[1] * len(row) for row in ids] if is_batch else [1] * len(ids)
    return Encoding(input_ids=ids, attention_mask=mask)
