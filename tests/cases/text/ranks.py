"""Byte-pair vocabularies of ranks in the forms that publishers give them, trained here, and texts to encode.

`ranks.json` holds the ids that tiktoken has for them. `python tests/cases/text/ranks.py` makes it anew; it
needs `tiktoken`.
"""

import json
import random
import re
import unicodedata
from base64 import b64encode
from collections import Counter
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("ranks.json")
TEXTS = [
    "", " ", "   ", "hello", " hello  world ", "a\n\n\nb", "\r\n\tx\r\n", "the cat's, THE CAT'S, we'Ll",
    "HelloWorld camelCase", "1234567 89 3.14159", "naïve café e\u0301 \u212b", "东京的猫", "猫cat猫 12猫",
    "日本語のテキスト、東京。", "〇々 ㈱", "한국어 텍스트", "🤗 👨‍👩‍👧 🇸🇪", "\u00a0\u2003\u3000x",
    "def f(x):\n    return x ** 2\n", "path/to//file\n//\n", "\x00\x01\x7f\u0080", "a" * 40, " " * 33 + "x",
    "ﬁ ſ ß İ", "<|im_end|>", "x<think>y</think>", " [INST] the [/INST]</s>", "not a <|im_end",
    "<|reserved_token_600|>", "<|extra_7|>",
]  # fmt: skip
COUNT = 320  # tokens of the vocabulary
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 5: "<think>", 6: "</think>"}  # Kimi's, by place
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "kimi": r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]*[{LOWER}&&[^\p{{Han}}]]+{ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]+[{LOWER}&&[^\p{{Han}}]]*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{REST}",
    "qwen": rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
RESERVED = 24  # special tokens of the tekken file, of which it names some
CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[THINK]", "[/THINK]"]


@cache
def tokens() -> list[bytes]:
    """All bytes, and the likeliest pairs of a few sentences, joined one after the other."""
    draw = random.Random(0)
    some = "the cat cat's sat on mat THE hello world def return x 12 345 café 东京 的 猫 日本語 🤗 //"
    some = [*some.split(), "\n\n", "", ""]
    words = Counter(re.findall(r"\s*\S+|\s+", " ".join(draw.choices(some, k=3000))))
    split = {tuple(bytes([b]) for b in word.encode()): n for word, n in words.items()}
    found = [bytes([b]) for b in range(256)]
    while len(found) < COUNT:
        pairs = Counter()
        for word, n in split.items():
            pairs.update(dict.fromkeys(pairwise(word), n))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        split = {joined(word, left, right): n for word, n in split.items()}
        if left + right not in found:
            found.append(left + right)
    return found


def joined(word: tuple[bytes, ...], left: bytes, right: bytes) -> tuple[bytes, ...]:
    made: list[bytes] = []
    for part in word:
        if made and (made[-1], part) == (left, right):
            made[-1] += part
        else:
            made.append(part)
    return tuple(made)


def write(folder: Path, kind: str, **config: Any) -> Path:
    """The files of a folder; `config` is more of its `tokenizer_config.json`."""
    lines = b"".join(b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens()))
    if kind == "kimi":
        (folder / "tiktoken.model").write_bytes(lines)
        named = {
            str(COUNT + i): {"content": token, "special": "think" not in token}
            for i, token in SPECIAL.items()
        }
        config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": named, **config}
        config = {"tokenizer_class": "TikTokenTokenizer", **config}
    elif kind == "qwen":
        (folder / "qwen.tiktoken").write_bytes(lines)
        config = {"tokenizer_class": "QWenTokenizer", **config}
    else:
        (folder / "tekken.json").write_text(json.dumps(tekken()))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tekken(**config: Any) -> dict[str, Any]:
    """The contents of a `tekken.json`, whose vocabulary is longer than it says."""
    vocab = [
        {"rank": i, "token_bytes": b64encode(token).decode(), "token_str": token.decode("utf-8", "ignore")}
        for i, token in enumerate([*tokens(), b"never", b"neverland"])
    ]
    sizes = {"default_vocab_size": COUNT + RESERVED, "default_num_special_tokens": RESERVED}
    control = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(CONTROL)]
    stated = {"pattern": PATTERNS["tekken"], "num_vocab_tokens": len(vocab), **sizes, "version": "v13"}
    return {"config": {**stated, **config}, "vocab": vocab, "special_tokens": control}


def special(kind: str) -> dict[str, int]:
    if kind == "kimi":
        return {SPECIAL.get(i, f"<|reserved_token_{COUNT + i}|>"): COUNT + i for i in range(258)}
    if kind == "qwen":
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
        return {name: COUNT + i for i, name in enumerate(names)}
    return {
        **{f"<SPECIAL_{i}>": i for i in range(len(CONTROL), RESERVED)},
        **{c: i for i, c in enumerate(CONTROL)},
    }


@cache
def by_tiktoken(kind: str) -> Any:
    """What encodes a text: tiktoken, given the vocabulary as the publisher's code gives it."""
    first = RESERVED if kind == "tekken" else 0
    library: Any = import_module("tiktoken")
    coder = library.Encoding(
        kind,
        pat_str=PATTERNS[kind],
        mergeable_ranks={token: first + i for i, token in enumerate(tokens())},
        special_tokens=special(kind),
    )
    return lambda text: coder.encode(
        unicodedata.normalize("NFC", text) if kind == "qwen" else text, allowed_special="all"
    )


if __name__ == "__main__":
    found = {kind: list(map(by_tiktoken(kind), TEXTS)) for kind in PATTERNS}
    FILE.write_text(json.dumps(found).replace("]], ", "]],\n") + "\n")
