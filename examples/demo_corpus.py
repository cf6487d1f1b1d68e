"""The corpus of the demo models: Python's own standard library, split by file, as one stream of tokens."""

import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END = "<|endoftext|>"
# Test suites would teach `def test_x(self)` and little else; the rest are data tables and applications.
SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "turtledemo",
    "encodings",
    "pydoc_data",
}
SKIPPED_FILES = {"html/entities.py"}


@dataclass(frozen=True)
class Corpus:
    """Source files by their path below the standard library, in an order that depends on the names alone."""

    train: dict[str, str]
    validation: dict[str, str]


def digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_validation(name: str) -> bool:
    """Return whether a file is for validation: one in sixteen is (a twentieth of the bytes), chosen by the
    hash of its name, so the choice does not depend on the interpreter's version."""
    return digest(name) % 16 == 0


def wanted(name: str) -> bool:
    folders = set(name.split("/")[:-1])
    return (
        not folders & SKIPPED_FOLDERS and name not in SKIPPED_FILES and not name.startswith("_sysconfigdata")
    )


def read_utf8(path: Path) -> str | None:
    """Return the text of a file, or None for the few that declare another encoding."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def standard_library() -> Corpus:
    """Return the running interpreter's standard library, without tests, data tables and applications."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted((p.relative_to(root).as_posix() for p in root.rglob("*.py")), key=digest)
    texts = {name: read_utf8(root / name) for name in names if wanted(name)}
    kept = {name: text for name, text in texts.items() if text}
    return Corpus(
        train={name: text for name, text in kept.items() if not is_validation(name)},
        validation={name: text for name, text in kept.items() if is_validation(name)},
    )


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al., arXiv 1508.07909) with one special token, `END`, of id 0."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return all texts as one stream, each after an `END` token: int32 [tokens]."""
    end = tokenizer.token_to_id(END)
    ids = itertools.chain.from_iterable([end, *e.ids] for e in tokenizer.encode_batch(texts))
    return np.fromiter(ids, np.int32)


def cut_spaces(stream: np.ndarray, tokenizer: Tokenizer, share: float, seed: int) -> np.ndarray:
    """Return a stream in which some words are separate tokens from the space before them, as after a prompt
    that ends in a space.

    Byte-level BPE joins the two, so a model that was trained on whole files only continues `def ` badly.
    "Token healing" repairs this at decoding time; here the model learns it.
    """
    space = tokenizer.token_to_id("Ġ")
    texts = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    joined = [len(text) > 1 and text[0] == " " and text[1:].isascii() and text[1] != " " for text in texts]
    apart = [
        [space, *tokenizer.encode(t[1:]).ids] if j else [i]
        for i, (t, j) in enumerate(zip(texts, joined, strict=True))
    ]
    cut = np.random.default_rng(seed).random(len(stream)) < share
    pieces = (apart[token] if c else [token] for token, c in zip(stream.tolist(), cut.tolist(), strict=True))
    return np.fromiter(itertools.chain.from_iterable(pieces), np.int32)


def batches(stream: np.ndarray, shape: tuple[int, int], seed: int, skip: int = 0) -> Iterator[np.ndarray]:
    """Yield windows of a stream without end, int32 [B, T+1]; batch `i` depends on (seed, i) alone, so a run
    can resume at `skip`.

    Every epoch cuts the stream at a new offset and shuffles the pieces.
    """
    B, T = shape
    per_epoch = ((len(stream) - 1) // T - 1) // B
    assert per_epoch > 0, f"{len(stream)} tokens do not fill one batch of {shape}"
    for epoch in itertools.count(skip // per_epoch):
        rng = np.random.default_rng((seed, epoch))
        starts = rng.integers(T) + T * rng.permutation(per_epoch * B).reshape(per_epoch, B)
        for row in starts[max(0, skip - epoch * per_epoch) :]:
            yield np.stack([stream[s : s + T + 1] for s in row])


def blocks(stream: np.ndarray, T: int) -> np.ndarray:
    """Cut a stream into windows that overlap by one token, int32 [blocks, T+1], so that each prediction
    counts once."""
    count = (len(stream) - 1) // T
    return np.stack([stream[i * T : i * T + T + 1] for i in range(count)])
