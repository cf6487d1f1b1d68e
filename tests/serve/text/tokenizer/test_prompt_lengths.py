"""A prompt that is far too long is refused by its length alone, and none is refused that would have been
short enough."""

import random
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from duetto import LLM, SamplingParams
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.tokenizer import length_bounds
from duetto.serve.text.tokenizer.chats.chat import tokenize_chat
from duetto.serve.text.tokenizer.stream import byte_alphabet
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

MERGES = (("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©"), ("e", "Ì"), ("eÌ", "ģ"))


def byte_level(merges=MERGES, normalizer=None, split=None) -> Backend:
    """Bytes, and tokens of several of them."""
    names = [*byte_alphabet(), *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*([split] if split else []), *steps])
    backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback(normalizer=None, fallback: bool = True) -> Backend:
    """As Llama 2's: characters, some of them joined, and bytes for all others."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "aa", "aaaa", "▁▁", "é"]
    merges = [("a", "a"), ("aa", "aa"), ("▁", "▁")]
    model = models.BPE(
        {name: i for i, name in enumerate(names)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=fallback,
    )
    backend = Backend(model)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), replace])
    return backend


def with_added(backend: Backend, **flags) -> Backend:
    backend.add_special_tokens([AddedToken("<|a rather long special token é|>", **flags)])
    return backend


NFC = normalizers.NFC()
BOUNDED = {
    "bytes": byte_level(),
    "composed": byte_level(normalizer=NFC),
    "composed bytes": byte_level(merges=(), normalizer=NFC),
    "composed after": byte_level(normalizer=normalizers.Sequence([normalizers.Replace("b", "a\u0301"), NFC])),
    "split": byte_level(split=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "added": with_added(byte_level(), normalized=True),
    "added composed": with_added(byte_level(normalizer=NFC), normalized=True),
    "stripping": with_added(byte_level(), lstrip=True, rstrip=True),
    "fallback": byte_fallback(),
    "fallback stripping": with_added(byte_fallback(), rstrip=True),
}
TEXTS = [
    "a" * 4000,
    " " * 4000,
    "e\u0301" * 2000,
    "é" * 2000,
    "\u1f82" * 1000,
    unicodedata.normalize("NFD", "\u1f82") * 1000,
    "\u1fef" * 1000,  # becomes one byte of three
    "ab" * 2000,
    "😀" * 1000,
    "<|a rather long special token é|>" * 100,
    "<|a rather long special token é|>" + " \n\t\u2003" * 1000 + "<|a rather long special token é|>",
    "\x1c\x1d\x85\u3000a" * 500,
    "\0\x01\x7f" * 500,
]


def mixtures(count: int) -> list[str]:
    draw = random.Random(0)
    return [
        "".join(draw.choices(TEXTS, k=3))[draw.randrange(50) :][: draw.randrange(1, 9000)]
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_it_surely_reaches(name):
    tokenizer = Tokenizer(BOUNDED[name], {})
    for text in TEXTS + mixtures(40):
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text[
            :50
        ]
    assert tokenizer.min_num_tokens("word " * 10_000) > 200


UNBOUNDED = {
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "shortened": byte_level(normalizer=normalizers.Replace("aaa", "a")),
    "collapsed": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "compatible": byte_level(normalizer=normalizers.NFKC()),
    "removed": byte_level(split=pre_tokenizers.Split(Regex(r"\s+"), "removed")),
    "unknown": byte_fallback(fallback=False),
    "words": Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "pieces": Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "unigram": Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_that_drop_or_join_characters_have_no_bound(name):
    assert Tokenizer(UNBOUNDED[name], {}).min_num_tokens("a b" * 10_000) == 0


def test_other_encoders_have_no_length_bound():
    assert Tokenizer(byte_level(), {}, encode=lambda text, special: [1]).min_num_tokens("a" * 10_000) == 0


def test_composition_joins_no_more_characters_than_is_assumed():
    whole = (chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    assert (
        max(len(unicodedata.normalize("NFD", character)) for character in whole)
        == length_bounds.MAX_COMPOSED_CHARS
    )


# ------------------------------------------------------------ refused


@pytest.fixture
def strict() -> Tokenizer:
    """The demo model's tokenizer, which tokenizes nothing that is long."""
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    assert tokenizer is not None
    encode = tokenizer._encode

    def short(text: str, special: bool, mark: str) -> list[int]:
        assert len(text) < 100_000, "this is tokenized"
        return encode(text, special, mark)

    tokenizer._encode = short
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer


LONG = "def main():\n" * 700_000  # 8.4 MB


def test_a_prompt_of_megabytes_is_not_tokenized(strict):
    intake = InputProcessor(strict.vocab_size, 1024, EngineOptions(), strict, ())
    for prompt in (LONG, {"prompt": LONG}):
        with pytest.raises(ValueError, match=r"the prompt has \d+ tokens or more, at most 1023 are allowed"):
            intake.make_subscription(prompt, SamplingParams())


def test_completions_of_a_prompt_share_their_stop_strings(strict):
    intake = InputProcessor(strict.vocab_size, 1024, EngineOptions(), strict, ())
    first, second = intake.make_subscription("x", SamplingParams(n=2, stop=["\n", "def"])).requests
    assert first.detokenizer is not None and second.detokenizer is not None
    assert (
        first.detokenizer is not second.detokenizer
        and first.detokenizer._stop_strings is second.detokenizer._stop_strings
    )


def test_long_conversations_are_not_tokenized(strict):
    with pytest.raises(ValueError, match=r"tokens or more, at most 1023 are allowed"):
        tokenize_chat(strict, [{"role": "user", "content": LONG}], 1023)


def test_a_slightly_too_long_prompt_is_refused_by_tokens(strict):
    intake = InputProcessor(strict.vocab_size, 64, EngineOptions(), strict, ())
    text = "x = [1]\n" * 20
    count = len(strict.encode(text))
    assert 63 < count
    with pytest.raises(ValueError, match=f"the prompt has {count} tokens, at most 63 are allowed"):
        intake.make_subscription(text, SamplingParams())
    wide = InputProcessor(strict.vocab_size, count + 1, EngineOptions(), strict, ())
    assert len(wide.make_subscription(text, SamplingParams()).requests[0].prompt) == count


def test_an_llm_says_how_long_a_prompt_may_be(strict):
    llm = LLM.__new__(LLM)
    llm.input_processor = InputProcessor(
        strict.vocab_size, 1024, EngineOptions(max_input_length=100), strict, ()
    )
    assert llm.longest_prompt == 100
