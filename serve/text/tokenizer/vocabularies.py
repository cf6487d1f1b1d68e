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
from .added import Vocabulary, add_tokens, added_beside, content, named, read_tokens
from .ranks import from_tekken, from_tiktoken

if TYPE_CHECKING:
    import tokenizers

EXPECTED = "tokenizer.json, tokenizer.model, vocab.json with merges.txt, tiktoken.model, or tekken.json"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # a space, in SentencePiece's pieces
UNKNOWN = " \N{DOUBLE QUESTION MARK} "  # the text that SentencePiece gives an unknown character
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ \d+\r?\n")  # how its files begin: bytes in base 64, and a rank
TIKTOKENS = ("tiktoken.model", "*.tiktoken")
OTHERS = (
    (TIKTOKENS, f"a tiktoken vocabulary of an unknown tokenizer_class (known: {', '.join(PRETOKENIZERS)})"),
    (("vocab.txt",), "a WordPiece vocabulary"),
    (("*.spm", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v*"), "a vocabulary"),
    (("tokenization_*.py",), "the model's own code"),
)


def find_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the tokenizer of a folder and its `tokenizer_config.json`; None without a tokenizer file. Raises
    ValueError, naming the file, for one that cannot be read or a kind that is not supported."""
    config = read_tokens(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        return from_json(folder / "tokenizer.json", config)
    config = read_tokens(folder / "special_tokens_map.json") | config
    if (folder / "tokenizer.model").is_file():
        return from_sentencepiece(folder / "tokenizer.model", config)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return from_merges(folder, {"eos_token": "<|endoftext|>"} | config)
    words = PRETOKENIZERS.get(config.get("tokenizer_class", ""))
    for file in sorted(file for pattern in TIKTOKENS for file in folder.glob(pattern)):
        if words is not None:
            return from_tiktoken(file, words, config)
    if (folder / "tekken.json").is_file():
        return from_tekken(folder / "tekken.json", config)
    return None


def unread(folder: Path) -> str:
    """Return the error for a folder whose tokenizer is of an unsupported kind; "" without any."""
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
    names = {backend.token_to_id(token): token for token in map(content, named(config)) if token}
    add_tokens(
        backend, folder, added_beside(folder, config, {i: t for i, t in names.items() if i is not None})
    )
    return Vocabulary(backend, config)


# ---------------------------------------------------------------- SentencePiece


def from_sentencepiece(file: Path, config: dict[str, Any]) -> Vocabulary:
    """Read a SentencePiece model, with the tokens that other files of its folder add. Control pieces, and
    tokens that the folder adds or names, are found in texts; between them the library encodes. Like
    transformers 5, only the text's own beginning gets the space that the model was trained to expect there,
    unless the configuration says `"legacy": true`; bos is added unless it says `"add_bos_token": false`."""
    spm = library(file)
    first, rest = processors(spm, file, bool(config.get("legacy", False)))
    names = {"bos_token": first.bos_id(), "eos_token": first.eos_id()}
    config = {name: first.id_to_piece(i) for name, i in names.items() if i >= 0} | config
    backend = pieces_backend(first, file.parent, config)
    added = backend.get_added_tokens_decoder()

    def ids_of(text: str, mark: str) -> list[int]:
        """Encode a text. The backend finds added tokens; the text between two of them is one word to it,
        mostly an unknown one, from which the mark is removed."""
        found = backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            part, sp = text[start:end], rest if start else first
            ids += (
                [token]
                if token in added and added[token].content in part
                else sp.encode(part.replace(mark, ""))
            )
        return ids

    def ends(name: str, default: bool) -> list[int]:
        token = content(config.get(name)) if config.get(f"add_{name}", default) else None
        found = None if token is None else backend.token_to_id(token)
        return [] if found is None else [found]

    before, after = ends("bos_token", True), ends("eos_token", False)

    def encode(text: str, special: bool, mark: str) -> list[int]:
        ids = ids_of(text, mark)
        return [*before, *ids, *after] if special else ids

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
    """Return the encoder of a text's beginning, and that of a part behind an added token."""
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
    """Return a vocabulary of whole pieces, which finds added tokens in a text and decodes."""
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
