"""Folders without tokenizer.json: ids and texts are those of the sentencepiece library, or of the file they
were made from."""

import io
import itertools
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from duetto.serve.text.tokenizer.detokenizer import Detokenizer
from duetto.serve.text.tokenizer.stop_strings import StopStrings
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece", reason="the models are trained with it")

TEXTS = [
    "", " ", "  ", "hello", " hello", "hello ", "  two  spaces  ", "a\nb", "\n\nx\n", "tab\tand\r\n",
    "naïve café", "東京", "🤗", "family 👨‍👩‍👧 emoji", "e\u0301 combining", "\u00a0nbsp", "ﬁ ligature",
    "<tool>", "x<tool>y", " <tool> ", "<tool><tool>", "▁literal▁", "<s>", "not a <token", "<0x0A>",
    "1234567 89", "\u0000", "a" * 300, "ЖЖЖ☃☃ ☃",
]  # fmt: skip
KINDS = [
    (kind, fallback, rule)
    for kind in ("bpe", "unigram")
    for fallback in (False, True)
    for rule in ("identity", "nmt_nfkc")
]


def corpus() -> list[str]:
    """Sentences of a few words, always the same ones."""
    draw = random.Random(0)
    words = (
        "the cat sat on mat hello world two spaces café tokyo says that it was is running runner ran 12 345"
    )
    return [" ".join(draw.choices(words.split(), k=9)) for _ in range(400)]


def train(kind: str, fallback: bool, rule: str, **options) -> bytes:
    """A small model with llama's normalisation ("identity", all spaces kept) or SentencePiece's own
    default."""
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=made,
        model_type=kind,
        byte_fallback=fallback,
        vocab_size=384 if fallback else 120,
        hard_vocab_limit=kind == "bpe",
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
        user_defined_symbols=["<tool>"],
        control_symbols=["[INST]"],
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return made.getvalue()


MODELS: dict[tuple, bytes] = {}


def model(*kind, **options) -> bytes:
    key = (*kind, *options.items())
    if key not in MODELS:
        MODELS[key] = train(*kind, **options)
    return MODELS[key]


def folder(path: Path, data: bytes, **files: dict) -> Path:
    (path / "tokenizer.model").write_bytes(data)
    for name, holds in files.items():
        (path / f"{name}.json").write_text(json.dumps(holds))
    return path


def both(path: Path, kind, **files: dict):
    data = model(*kind)
    return Tokenizer.from_folder(folder(path, data, **files)), spm.SentencePieceProcessor(model_proto=data)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    stream = Detokenizer(tokenizer, skip)
    return "".join(stream.push([i]) for i in ids) + stream.finish()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_ids_and_texts_are_those_of_the_library(tmp_path, kind):
    ours, theirs = both(tmp_path, kind)
    plain = [text for text in TEXTS if "<s>" not in text]
    for text in plain:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), text
        assert ours.encode(text) == [theirs.bos_id(), *ids]
        assert ours.decode(ids, True) == theirs.decode(ids) == streamed(ours, ids), text
    assert ours.vocab_size == theirs.get_piece_size()
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k[2] == "identity"], ids=lambda k: "-".join(map(str, k))
)
@given(text=st.text(st.sampled_from("abchest  \n▁é京🤗☃<tool>0\t"), max_size=30) | st.text(max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_text(tmp_path_factory, kind, text):
    text = text.replace("<s>", "").replace("</s>", "")
    if kind not in LOADED:
        LOADED[kind] = both(tmp_path_factory.mktemp("spm"), kind)
    ours, theirs = LOADED[kind]
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, True) == theirs.decode(ids) == streamed(ours, ids)


LOADED: dict[tuple, tuple] = {}


def test_every_piece_decodes_as_in_the_library(tmp_path):
    ours, theirs = both(tmp_path, ("bpe", True, "identity"))
    ordinary = [i for i in range(theirs.get_piece_size()) if not theirs.is_byte(i)]
    for i in ordinary:
        after = [ours.token_id("▁the"), i]
        assert ours.decode(after, True) == theirs.decode(after) == streamed(ours, after)
    assert ours.token_bytes(ours.token_id("<0xE2>")) == b"\xe2"
    assert ours.decode_token(ours.token_id("▁the")) == " the"


def test_text_split_by_special_tokens_gets_one_leading_space(tmp_path):
    """As transformers 5 does it; with `legacy` every part is encoded as a text of its own, as it was
    before."""
    kind = ("bpe", True, "identity")
    ours, theirs = both(tmp_path, kind)
    inst, bos = theirs.piece_to_id("[INST]"), theirs.bos_id()
    later = theirs.encode("\nhello cat")[len(theirs.encode("\n")) :]
    assert theirs.id_to_piece(later[0]) != "▁hello"
    assert ours.encode("hello[INST]hello cat</s>") == [
        bos, *theirs.encode("hello"), inst, *later, theirs.eos_id(),
    ]  # fmt: skip
    assert ours.decode(ours.encode("hello[INST]hello cat</s>"), True) == "hellohello cat"
    assert ours.decode(ours.encode("hello[INST] cat")) == "<s> hello[INST] cat"
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": true}')
    legacy = Tokenizer.from_folder(tmp_path)
    assert legacy.encode("hello[INST]hello cat")[1:] == [
        *theirs.encode("hello"), inst, *theirs.encode("hello cat"),
    ]  # fmt: skip


def test_stop_strings_and_streams_work_on_such_a_tokenizer(tmp_path):
    ours, _ = both(tmp_path, ("unigram", True, "identity"))
    stream = Detokenizer(ours, stop_strings=StopStrings(["sat on"]))
    given_out = [stream.push([i]) for i in ours.encode("the cat sat on the mat", add_special_tokens=False)]
    assert "".join(given_out) == "the cat " and stream.stop_hit == "sat on"
    prompt = ours.encode("the cat")
    after = Detokenizer(ours, prompt_ids=prompt)
    assert "".join(after.push([i]) for i in ours.encode("sat", add_special_tokens=False)) == " sat"


def test_files_beside_it_add_and_name_tokens(tmp_path):
    kind = ("bpe", True, "identity")
    size = spm.SentencePieceProcessor(model_proto=model(*kind)).get_piece_size()
    ours, theirs = both(
        tmp_path,
        kind,
        added_tokens={"<|im_start|>": size, "<|im_end|>": size + 1},
        special_tokens_map={"eos_token": {"content": "<|im_end|>"}, "unk_token": "<unk>"},
        tokenizer_config={
            "add_bos_token": False,
            "add_eos_token": True,
            "added_tokens_decoder": {
                "0": {"content": "<unk>", "special": True},
                str(size): {"content": "<|im_start|>", "special": True},
                str(size + 4): {"content": "<mask>", "special": False, "lstrip": True},
            },
            "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        },
    )
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token_id) == ("<|im_end|>", size + 1, theirs.bos_id())
    hello = theirs.encode("hello")
    assert ours.encode("hello  <mask><unk>") == [*hello, size + 4, 0, size + 1]
    assert ours.decode([*hello, size + 4, 0, size + 1], True) == "hello<mask>"
    chat = ours.apply_chat_template([{"role": "user", "content": " cat"}])
    assert chat.input_ids == [size, *theirs.encode("\n cat")[len(theirs.encode("\n")) :], size + 1]


@pytest.mark.extras
def test_transformers_gives_the_same_ids(tmp_path):
    """Where it agrees with the library: it puts no space before a text that begins with one."""
    transformers = pytest.importorskip("transformers", reason="a second opinion")
    ours, _ = both(
        tmp_path,
        ("bpe", True, "identity"),
        tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    )
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    for text in [
        "hello",
        "two  spaces ",
        "a\nb",
        "東京 🤗",
        "hello</s>cat",
        "<s> x",
        "[INST] the cat [INST]",
    ]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text), True) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


REFUSED = {
    "a model of another kind": (b"IQ= 0", {}, r"tokenizer\.model cannot be read as a SentencePiece model"),
    "an empty model": (b"", {}, r"tokenizer\.model cannot be read as a SentencePiece model"),
    "ids with two names": (
        None, {"added_tokens": {"<s>": 9000}}, r"added token '<s>' has id 1, but would become 9000",
    ),
    "ids that are none": (
        None, {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}},
        "added_tokens_decoder is malformed",
    ),
    "a token that is a number": (
        None, {"special_tokens_map": {"unk_token": 5}},
        r"special_tokens_map\.json: unk_token is 5, which is no token",
    ),
    "no object": (
        None, {"special_tokens_map": [1]}, r"special_tokens_map\.json: holds a JSON list, expected an object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, case):
    data, files, said = REFUSED[case]
    folder(tmp_path, model("bpe", True, "identity") if data is None else data, **files)
    with pytest.raises(ValueError, match=said):
        Tokenizer.from_folder(tmp_path)


def test_spaces_behind_words_are_refused(tmp_path):
    folder(tmp_path, model("unigram", False, "identity", treat_whitespace_as_suffix=True))
    with pytest.raises(ValueError, match="treat_whitespace_as_suffix is true, which is not supported"):
        Tokenizer.from_folder(tmp_path)


def test_without_the_package_the_command_that_adds_it_is_named(tmp_path, monkeypatch):
    folder(tmp_path, model("bpe", True, "identity"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"tokenizer\.model needs .*: pip install sentencepiece"):
        Tokenizer.from_folder(tmp_path)


def test_vocab_and_merges_files_equal_their_tokenizer_json(tmp_path):
    """As GPT-2's are stored."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    ends = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=ends, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    whole = json.loads(backend.to_str())["model"]
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None and (ours.eos_token, ours.eos_token_id) == (
        "<|endoftext|>",
        whole["vocab"][ends[0]],
    )
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == backend.encode(text).ids == merged(text, whole["vocab"], pairs)
        assert ours.encode(text + ends[0] + text) == [*ids, ours.eos_token_id, *ids]
        assert ours.decode(ids, True) == text == streamed(ours, ids)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ValueError, match="'Qwen2Tokenizer' without tokenizer.json is not supported"):
        Tokenizer.from_folder(tmp_path)


def merged(text: str, vocab: dict[str, int], pairs: list[str]) -> list[int]:
    """Byte-pair encoding by hand: in each word the pair that was learned first is joined, again and again."""
    ids, rank = [], {pair: i for i, pair in enumerate(pairs)}
    for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text):
        parts = list(word)
        while found := [p for p in itertools.pairwise(parts) if " ".join(p) in rank]:
            first = min(found, key=lambda p: rank[" ".join(p)])
            i = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == first)
            parts[i : i + 2] = ["".join(first)]
        ids += [vocab[part] for part in parts]
    return ids


def test_special_tokens_in_messages_may_be_plain_text(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model("bpe", True, "identity")))
    assert tokenizer is not None
    tokenizer.chat_template = "[INST]{{ messages[0].content }}[INST]"
    messages = [{"role": "user", "content": "the [INST] cat<s> x<tool>y"}]
    control = tokenizer.convert_tokens_to_ids("[INST]")
    assert tokenizer.apply_chat_template(messages).input_ids.count(control) == 3
    tokenizer.split_special_tokens = True
    ids = tokenizer.apply_chat_template(messages).input_ids
    assert ids[0] == ids[-1] == control and not tokenizer.special_ids.intersection(ids[1:-1])
    assert tokenizer.convert_tokens_to_ids("<tool>") in ids, "which is a token like others"
    assert tokenizer.decode(ids) == "[INST]the [INST] cat<s> x<tool>y[INST]"
