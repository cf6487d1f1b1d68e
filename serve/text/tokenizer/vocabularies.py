"""Tokenizer files of a folder: `tokenizer.json`, a SentencePiece model, GPT-2's two files, or a vocabulary of
tiktoken's or Mistral's. `tokenizers` holds every vocabulary and decodes, so that streamed text has one way.
It encodes too, except for SentencePiece (Kudo and Richardson, arXiv 1808.06226): that library's normalisation
and its ties between equally good pieces are not those of a conversion."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....checkpoints.dialects import PRETOKENIZERS
from .added_tokens import (
    Vocabulary,
    add_missing_tokens,
    add_tokens_at_ids,
    list_special_tokens,
    read_added_tokens,
    read_token_config,
    token_content,
)
from .ranks import read_tekken, read_tiktoken

if TYPE_CHECKING:
    import tokenizers

EXPECTED_FILES = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, tiktoken.model, or tekken.json"
SPACE_PIECE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, in SentencePiece's pieces
UNKNOWN_TEXT = " \N{DOUBLE QUESTION MARK} "  # the text that SentencePiece gives an unknown character
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # how its files begin: bytes in base 64, and a rank
TIKTOKEN_FILES = ("tiktoken.model", "*.tiktoken")
UNSUPPORTED_FILES = (
    (
        TIKTOKEN_FILES,
        f"a tiktoken vocabulary of an unknown tokenizer_class (known: {', '.join(PRETOKENIZERS)})",
    ),
    (("vocab.txt",), "a WordPiece vocabulary"),
    (("*.spm", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*"), "a vocabulary"),
    (("tokenization_*.py",), "the model's own code"),
)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the tokenizer of a folder and its `tokenizer_config.json`; None without a tokenizer file. Raises
    ValueError, naming the file, for one that cannot be read or a kind that is not supported."""
    config = read_token_config(folder / "tokenizer_config.json")
    names = read_token_config(folder / "special_tokens_map.json")
    if (folder / "tokenizer.json").is_file():
        config |= {} if "added_tokens_decoder" in config else names
        return read_tokenizer_json(folder / "tokenizer.json", config)
    config = names | config
    if (folder / "tokenizer.model").is_file():
        return read_sentencepiece(folder / "tokenizer.model", config)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return read_gpt2_vocabulary(folder, {"eos_token": "<|endoftext|>"} | config)
    rules = PRETOKENIZERS.get(config.get("tokenizer_class", ""))
    for file in sorted(file for pattern in TIKTOKEN_FILES for file in folder.glob(pattern)):
        if rules is not None:
            return read_tiktoken(file, rules, config)
    if (folder / "tekken.json").is_file():
        return read_tekken(folder / "tekken.json", config)
    return None


def describe_unsupported(folder: Path) -> str:
    """Return the error for a folder whose tokenizer is of an unsupported kind; "" without any."""
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    for patterns, what in UNSUPPORTED_FILES:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return f"{folder / name} is {what}, which is not read: expected {EXPECTED_FILES}"
    return ""


def read_tokenizer_json(file: Path, config: Mapping[str, Any]) -> Vocabulary:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error
    add_missing_tokens(backend, file.parent, config)
    return Vocabulary(backend, config)


def read_gpt2_vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read GPT-2's byte-level pairs (Radford et al., 2019) from `vocab.json` and `merges.txt`."""
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
    names = {
        backend.token_to_id(token): token
        for token in map(token_content, list_special_tokens(config))
        if token
    }
    add_tokens_at_ids(
        backend, folder, read_added_tokens(folder, config, {i: t for i, t in names.items() if i is not None})
    )
    return Vocabulary(backend, config)


# ---------------------------------------------------------------- SentencePiece


def read_sentencepiece(file: Path, config: dict[str, Any]) -> Vocabulary:
    """Read a SentencePiece model, with the tokens that other files of its folder add.

    The backend finds control pieces, and tokens that the folder adds or names; the library encodes the text
    between them. As in Transformers 5, only the beginning of a text gets the space that the model was trained
    to expect there, unless the configuration says `"legacy": true`. bos is added unless it says
    `"add_bos_token": false`.
    """
    spm = import_sentencepiece(file)
    first, others = make_sentencepiece_processors(spm, file, bool(config.get("legacy", False)))
    names = {"bos_token": first.bos_id(), "eos_token": first.eos_id()}
    config = {name: first.id_to_piece(i) for name, i in names.items() if i >= 0} | config
    backend = make_pieces_backend(first, file.parent, config)
    added = backend.get_added_tokens_decoder()

    def encode_parts(text: str, mark: str) -> list[int]:
        """Encode a text. The backend finds added tokens; the text between two of them is one word to it,
        mostly an unknown one, from which the mark is removed."""
        encoding = backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            part, sp = text[start:end], others if start else first
            ids += (
                [token]
                if token in added and added[token].content in part
                else sp.encode(part.replace(mark, ""))
            )
        return ids

    def read_boundary_ids(name: str, default: bool) -> list[int]:
        token = token_content(config.get(name)) if config.get(f"add_{name}", default) else None
        token_id = None if token is None else backend.token_to_id(token)
        return [] if token_id is None else [token_id]

    prefix_ids, suffix_ids = read_boundary_ids("bos_token", True), read_boundary_ids("eos_token", False)

    def encode(text: str, special: bool, mark: str) -> list[int]:
        ids = encode_parts(text, mark)
        return [*prefix_ids, *ids, *suffix_ids] if special else ids

    return Vocabulary(backend, config | {"add_bos_token": False}, encode)


def import_sentencepiece(file: Path) -> Any:
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package sentencepiece: pip install sentencepiece ({error})"
        ) from error
    return sentencepiece, sentencepiece_model_pb2


def make_sentencepiece_processors(spm: Any, file: Path, legacy: bool) -> tuple[Any, Any]:
    """Return the encoder of a text's beginning, and the encoder of a part behind an added token."""
    library, messages = spm
    try:
        model = messages.ModelProto.FromString(file.read_bytes())
        first = library.SentencePieceProcessor(model_proto=model.SerializeToString())
    except Exception as error:  # protobuf's own errors, and RuntimeError of the library
        if TIKTOKEN_LINE.match(file.read_bytes()[:200]):
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


def make_pieces_backend(sp: Any, folder: Path, config: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """Return a vocabulary of whole pieces, which finds added tokens in a text and decodes."""
    from tokenizers import Tokenizer, decoders, models

    pieces = {i: sp.id_to_piece(i) for i in range(sp.get_piece_size())}
    unknown = pieces[sp.unk_id()]
    control = {i: piece for i, piece in pieces.items() if sp.is_control(i)}
    added = read_added_tokens(folder, config, control)
    vocab = {piece: i for i, piece in (pieces | {i: token.content for i, token in added.items()}).items()}
    backend = Tokenizer(models.WordLevel(vocab | {unknown: sp.unk_id()}, unk_token=unknown))
    steps = [decoders.Replace(unknown, UNKNOWN_TEXT), decoders.Replace(SPACE_PIECE, " ")]
    steps += [decoders.ByteFallback()] if any(map(sp.is_byte, pieces)) else []
    dummy_prefix = sp.encode("a", out_type=str)[0].startswith(SPACE_PIECE)
    steps += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if dummy_prefix else [])]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    add_tokens_at_ids(backend, folder, added)
    return backend
