"""From a folder's tokenizer files to one that encodes: `tokenizer.json`, a SentencePiece model, or GPT-2's
two files.

`tokenizers` keeps every vocabulary and decodes, so that streamed text has one way. It encodes too, except for
SentencePiece (Kudo and Richardson, arXiv 1808.06226): there the library of that name does, because its
normalisation and its ties between equally good pieces are not those of a conversion.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...checkpoints.folders import read_json

if TYPE_CHECKING:
    import tokenizers

EXPECTED = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, in SentencePiece's pieces
UNKNOWN = " \N{DOUBLE QUESTION MARK} "  # the text that SentencePiece gives an unknown character
NAMED = ("unk_token", "bos_token", "eos_token", "pad_token")


TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # how its files begin: bytes in base 64, and a rank
OTHERS = (
    (("tekken.json",), "a tekken vocabulary"),
    (("tiktoken.model", "*.tiktoken"), "a tiktoken vocabulary"),
    (("vocab.txt",), "a WordPiece vocabulary"),
    (("*.spm", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*"), "a vocabulary"),
    (("tokenization_*.py",), "the model's own code"),
)


class Described(msgspec.Struct):
    """A special token with what else is known of it."""

    content: str


Token = str | Described


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its files give it. `backend` has the tokens and decodes; it encodes too, unless `encode`
    is there, which makes ids of a text and of whether special tokens are added. `config` is completed by what
    the files imply.
    """

    backend: "tokenizers.Tokenizer"
    config: Mapping[str, Any]
    encode: Callable[[str, bool], list[int]] | None = None


def find_vocabulary(folder: Path) -> Vocabulary | None:
    """The tokenizer of a folder and its `tokenizer_config.json`; None if it has no tokenizer file.

    Raises ValueError, naming the file, for one that cannot be read or a kind that is not supported.
    """
    config = read_tokens(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        return from_json(folder / "tokenizer.json", config)
    config = read_tokens(folder / "special_tokens_map.json") | config
    if (folder / "tokenizer.model").is_file():
        return from_sentencepiece(folder / "tokenizer.model", config)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return from_merges(folder, {"eos_token": "<|endoftext|>"} | config)
    return None


def unread(folder: Path) -> str:
    """What a folder has in place of a tokenizer that can be read; "" where it has nothing of the kind."""
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    for patterns, what in OTHERS:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return f"{folder / name} is {what}, which is not read: expected {EXPECTED}"
    return ""


def from_json(file: Path, config: Mapping[str, Any]) -> Vocabulary:
    import tokenizers

    try:
        return Vocabulary(tokenizers.Tokenizer.from_file(str(file)), config)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error


def from_merges(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """GPT-2's byte-level pairs (Radford et al., 2019) from `vocab.json` and `merges.txt`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(
            f"{folder}: tokenizer_class {kind!r} without tokenizer.json is not supported: add tokenizer.json"
        )
    try:
        backend = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder}: vocab.json and merges.txt cannot be read: {error}") from error
    prefix = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    names = {backend.token_to_id(token): token for token in map(content, named(config)) if token}
    add_tokens(
        backend, folder, added_beside(folder, config, {i: t for i, t in names.items() if i is not None})
    )
    return Vocabulary(backend, config)


# ---------------------------------------------------------------- SentencePiece


def from_sentencepiece(file: Path, config: dict[str, Any]) -> Vocabulary:
    """A SentencePiece model, with the tokens that other files of its folder add to it.

    Control pieces, and tokens that the folder adds or names, are found in texts; between them the library
    encodes. Like transformers 5, only the text's own beginning gets the space that the model was trained to
    expect there, unless the configuration says `"legacy": true`; bos is put in front unless it says
    `"add_bos_token": false`.
    """
    spm = library(file)
    first, rest = processors(spm, file, bool(config.get("legacy", False)))
    names = {"bos_token": first.bos_id(), "eos_token": first.eos_id()}
    config = {name: first.id_to_piece(i) for name, i in names.items() if i >= 0} | config
    backend = pieces_backend(first, file.parent, config)
    added = backend.get_added_tokens_decoder()

    def ids_of(text: str) -> list[int]:
        """Added tokens are the backend's to find; what lies between two of them is one word to it, mostly an
        unknown one."""
        found = backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            part, sp = text[start:end], rest if start else first
            ids += [token] if token in added and added[token].content in part else sp.encode(part)
        return ids

    def ends(name: str, default: bool) -> list[int]:
        token = content(config.get(name)) if config.get(f"add_{name}", default) else None
        found = None if token is None else backend.token_to_id(token)
        return [] if found is None else [found]

    before, after = ends("bos_token", True), ends("eos_token", False)

    def encode(text: str, special: bool) -> list[int]:
        return [*before, *ids_of(text), *after] if special else ids_of(text)

    return Vocabulary(backend, config | {"add_bos_token": False}, encode)


def library(file: Path) -> Any:
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package sentencepiece: pip install sentencepiece ({error})"
        ) from error
    return sentencepiece, sentencepiece_model_pb2


def processors(spm: Any, file: Path, legacy: bool) -> tuple[Any, Any]:
    """What encodes the beginning of a text, and what encodes a part of it behind an added token."""
    library, messages = spm
    try:
        model = messages.ModelProto.FromString(file.read_bytes())
        first = library.SentencePieceProcessor(model_proto=model.SerializeToString())
    except Exception as error:  # protobuf's own errors, and RuntimeError of the library
        if TIKTOKEN.match(file.read_bytes()[:200]):
            raise ValueError(
                f"{file} is a tiktoken vocabulary, which is not read: add tokenizer.json"
            ) from error
        raise ValueError(f"{file} cannot be read as a SentencePiece model: {error}") from error
    if not model.pieces:
        raise ValueError(f"{file} cannot be read as a SentencePiece model: it has no pieces")
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError(f"{file}: treat_whitespace_as_suffix is true, which is not supported")
    if legacy or not model.normalizer_spec.add_dummy_prefix:
        return first, first
    model.normalizer_spec.add_dummy_prefix = False
    return first, library.SentencePieceProcessor(model_proto=model.SerializeToString())


def pieces_backend(sp: Any, folder: Path, config: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """A vocabulary of whole pieces: it finds added tokens in a text, and decodes."""
    from tokenizers import Tokenizer, decoders, models

    pieces = {i: sp.id_to_piece(i) for i in range(sp.get_piece_size())}
    unknown = pieces[sp.unk_id()]
    control = {i: piece for i, piece in pieces.items() if sp.is_control(i)}
    added = added_beside(folder, config, control)
    vocab = {piece: i for i, piece in (pieces | {i: token.content for i, token in added.items()}).items()}
    backend = Tokenizer(models.WordLevel(vocab | {unknown: sp.unk_id()}, unk_token=unknown))
    steps = [decoders.Replace(unknown, UNKNOWN), decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback()] if any(map(sp.is_byte, pieces)) else []
    dummy_prefix = sp.encode("a", out_type=str)[0].startswith(SPACE)
    steps += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if dummy_prefix else [])]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    add_tokens(backend, folder, added)
    return backend


# ---------------------------------------------------------------- tokens that other files add


def named(config: Mapping[str, Any]) -> list[Any]:
    """The special tokens that a configuration names, each as a string or as an object."""
    return [config[name] for name in NAMED if config.get(name)] + list(
        config.get("additional_special_tokens") or ()
    )


def content(token: Any) -> str | None:
    """A token's text; files give it alone, or in an object with what else is known of it."""
    return token.get("content") if isinstance(token, Mapping) else token


def added_beside(
    folder: Path, config: Mapping[str, Any], known: Mapping[int, str]
) -> dict[int, "tokenizers.AddedToken"]:
    """Added tokens by id: those known from the model itself are special, those of `added_tokens.json` and of
    `added_tokens_decoder` as these and the names of special tokens say. Raises ValueError for an id that is
    no number."""
    from tokenizers import AddedToken

    special = {content(token) for token in named(config)}
    found = {i: AddedToken(token, special=True, normalized=False) for i, token in known.items()}
    try:
        file = folder / "added_tokens.json"
        for token, i in (read_json(file) if file.exists() else {}).items():
            found[int(i)] = AddedToken(token, special=token in special, normalized=False)
        for i, entry in config.get("added_tokens_decoder", {}).items():
            flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "special")}
            flags["special"] |= entry["content"] in special
            found[int(i)] = AddedToken(entry["content"], normalized=False, **flags)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder}: added_tokens.json or added_tokens_decoder is malformed: {error!r}"
        ) from error
    return dict(sorted(found.items()))


def add_tokens(
    backend: "tokenizers.Tokenizer", folder: Path, added: Mapping[int, "tokenizers.AddedToken"]
) -> None:
    """Add tokens under their ids. Raises ValueError where one cannot have its id."""
    for i, token in added.items():
        backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != i:
            raise ValueError(f"{folder}: added token {token.content!r} has id {i}, but would become {got}")


def read_tokens(file: Path) -> dict[str, Any]:
    """The JSON object of a file that names special tokens. Raises ValueError for a token or a list of them
    that is none."""
    config = read_json(file) if file.exists() else {}
    expected = dict.fromkeys(NAMED, Token | None) | {"additional_special_tokens": list[Token] | None}
    for name, kind in expected.items():
        try:
            msgspec.convert(config.get(name), kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{file}: {name} is {config[name]!r:.80}, which is no token: {error}") from error
    return config
