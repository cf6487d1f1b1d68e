"""Byte-pair vocabularies with ranks but without merges: tiktoken's files, and Mistral's `tekken.json`. Their
encoders keep a word that is a token, and otherwise join again and again the two neighbours that make the
token of the lowest rank. So every split of a token into two others is a merge, of the token's rank."""

import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....checkpoints.dialects import PretokenizerRules
from .added_tokens import Vocabulary, add_tokens_at_ids, read_added_tokens
from .stream import byte_alphabet
from .template_files import INSTRUCT_TEMPLATES

if TYPE_CHECKING:
    import tokenizers

Ranks = Mapping[bytes, int]

# ---------------------------------------------------------------- tiktoken


def read_tiktoken(file: Path, rules: PretokenizerRules, config: Mapping[str, Any]) -> Vocabulary:
    """Read a tiktoken file: lines of a token in base 64 and its rank. The next ids are special tokens, which
    `tokenizer_config.json` may name."""
    ranks = read_ranks(file)
    special = {i: name.format(id=i) for i, name in enumerate(rules.special, len(ranks))}
    added = read_added_tokens(file.parent, config, special)
    return Vocabulary(make_byte_pair_tokenizer(file, ranks, rules, added), config)


def read_ranks(file: Path) -> Ranks:
    """Read ranks. Raises ValueError with the number of a malformed line, and for ranks with holes."""
    ranks, lines = {}, file.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:
            message = f"{file}: line {number} is {line[:40]!r}, expected a token in base 64 and its rank"
            raise ValueError(message) from error
    return check_ranks(file, ranks, len(lines))


def check_ranks(file: Path, ranks: Ranks, count: int) -> Ranks:
    """Return the ranks of `count` lines. Raises ValueError unless they are the numbers from 0 on, each once,
    and each byte is a token, so that any text can be encoded."""
    if len(ranks) != count or sorted(ranks.values()) != list(range(count)):
        raise ValueError(f"{file}: the ranks of its {count} tokens are not the numbers from 0 on, each once")
    missing_byte = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing_byte is not None:
        raise ValueError(f"{file}: no token is the byte 0x{missing_byte:02X}, expected one for every byte")
    return ranks


# ---------------------------------------------------------------- tekken


class TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: bytes


class TekkenSpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class TekkenConfig(msgspec.Struct):
    """`default_vocab_size` counts the special tokens, which come first, and may cut the vocabulary."""

    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str = ""


class Tekken(msgspec.Struct):
    config: TekkenConfig
    vocab: list[TekkenToken]
    special_tokens: list[TekkenSpecialToken] | None = None


# Special tokens of files without names for them.
DEFAULT_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
TOKEN_BY_ROLE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def read_tekken(file: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read Mistral's vocabulary, with its instruct format if the folder has no chat template."""
    try:
        tekken = msgspec.json.decode(file.read_bytes(), type=Tekken)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} cannot be read as a tekken vocabulary: {error}") from error
    sizes = tekken.config
    num_special = sizes.default_num_special_tokens
    special_names = dict(enumerate(DEFAULT_SPECIAL_TOKENS))
    if tekken.special_tokens is not None:
        special_names = {token.rank: token.token_str for token in tekken.special_tokens}
    special = {i: f"<SPECIAL_{i}>" for i in range(num_special)} | special_names
    ranks = {
        token.token_bytes: token.rank for token in tekken.vocab[: sizes.default_vocab_size - num_special]
    }
    if len(special) != num_special or len(ranks) != sizes.default_vocab_size - num_special:
        raise ValueError(
            f"{file}: has {len(special)} special tokens and {len(ranks)} others, expected "
            f"default_num_special_tokens={num_special} and default_vocab_size={sizes.default_vocab_size}"
        )
    ranks = check_ranks(file, ranks, len(ranks))
    added = read_added_tokens(file.parent, config, special)
    roles = {role: token for role, token in TOKEN_BY_ROLE.items() if token in special.values()}
    template = {"chat_template": INSTRUCT_TEMPLATES.get(sizes.version)}
    backend = make_byte_pair_tokenizer(file, ranks, PretokenizerRules(sizes.pattern), added, num_special)
    return Vocabulary(backend, {"add_bos_token": True, **template, **roles, **config})


# ---------------------------------------------------------------- a tokenizer of ranks


def make_byte_pair_tokenizer(
    file: Path,
    ranks: Ranks,
    rules: PretokenizerRules,
    added: Mapping[int, "tokenizers.AddedToken"],
    first_id: int = 0,
) -> "tokenizers.Tokenizer":
    """Return a tokenizer with the ranks' tokens from the id `first_id` on. Raises ValueError for a pattern
    that is no regular expression, and for an added token that cannot have its id."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocab = {spelled[token]: first_id + rank for token, rank in ranks.items()}
    taken_ids = range(first_id, first_id + len(ranks))
    vocab |= {
        token.content: i for i, token in added.items() if i not in taken_ids and token.content not in vocab
    }
    merges = [(spelled[a], spelled[b]) for a, b in iterate_merges(ranks)]
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(rules.pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: pattern {rules.pattern!r:.80} cannot be used: {error}") from error
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    if rules.uses_nfc:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    add_tokens_at_ids(backend, file.parent, added)
    return backend


def iterate_merges(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    """Yield every two tokens that make a third one, by its rank."""
    for token in sorted(ranks, key=ranks.__getitem__):
        for i in range(1, len(token)):
            if token[:i] in ranks and token[i:] in ranks:
                yield token[:i], token[i:]
