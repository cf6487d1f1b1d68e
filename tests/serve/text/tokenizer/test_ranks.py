"""Vocabularies that give ranks but no merges: ids and texts are tiktoken's."""

import json
import re
from pathlib import Path

import pytest
from cases.text.ranks import (
    CONTROL,
    COUNT,
    FILE,
    PATTERNS,
    RESERVED,
    TEXTS,
    by_tiktoken,
    special,
    tekken,
    tokens,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.checkpoints.dialects import PRETOKENIZERS
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError
from duetto.serve.text.tokenizer.detokenizer import Detokenizer
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    return {kind: read(write(tmp_path_factory.mktemp(kind), kind)) for kind in PATTERNS}


def read(folder: Path) -> Tokenizer:
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    stream = Detokenizer(tokenizer, skip)
    return "".join(stream.push([i]) for i in ids) + stream.finish()


@pytest.mark.parametrize("kind", PATTERNS)
def test_ids_are_tiktokens_and_the_text_comes_back(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for text, ids in zip(TEXTS, GOLDEN[kind], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        whole = text if kind != "qwen" else text.replace("e\u0301", "é").replace("\u212b", "Å")
        assert tokenizer.decode(ids) == streamed(tokenizer, ids, False) == whole
        assert tokenizer.decode(ids, True) == streamed(tokenizer, ids, True)
    assert len(tokenizer) == COUNT + len(special(kind))
    assert all(tokenizer.token_id(name) == i for name, i in special(kind).items())


@pytest.mark.extras
@pytest.mark.parametrize("kind", PATTERNS)
@given(
    text=st.text(st.sampled_from("the catHE'sS 1234\n\r\t/東京猫のé🤗<|im_end|>"), max_size=40) | st.text()
)
@settings(max_examples=500, deadline=None)
def test_any_text(tokenizers, kind, text):
    pytest.importorskip("tiktoken", reason="the reference here")
    assert tokenizers[kind].encode(text, add_special_tokens=False) == by_tiktoken(kind)(text)


def test_patterns_are_those_that_the_ids_were_made_with():
    assert PRETOKENIZERS["TikTokenTokenizer"].pattern == PATTERNS["kimi"]
    assert PRETOKENIZERS["QWenTokenizer"].pattern == PATTERNS["qwen"]


@pytest.mark.parametrize("kind", PATTERNS)
def test_invalid_bytes_are_replaced_and_every_byte_has_a_token(tokenizers, kind):
    tokenizer = tokenizers[kind]
    first = RESERVED if kind == "tekken" else 0
    assert [tokenizer.token_bytes(first + i) for i in range(256)] == [bytes([i]) for i in range(256)]
    ids = [first + byte for byte in b"a\xff\xe4\xb8b\xe4\xb8\xad"]
    assert tokenizer.decode(ids) == streamed(tokenizer, ids, False) == "a\ufffd\ufffdb中"
    assert tokenizer.token_bytes(first + COUNT - 1) == tokens()[-1]


def test_kimis_named_tokens_are_in_its_configuration_and_others_reserved(tokenizers):
    kimi = tokenizers["kimi"]
    assert (kimi.bos_token_id, kimi.eos_token_id) == (COUNT, COUNT + 1)
    ids = kimi.encode("a<|im_end|><think>b")
    assert ids == [97, COUNT + 2, COUNT + 5, 98] and kimi.decode(ids, True) == "a<think>b"
    assert kimi.token_id(f"<|reserved_token_{COUNT + 257}|>") == COUNT + 257


def test_tekkens_special_tokens_come_first_and_cut_the_vocabulary(tokenizers):
    tokenizer = tokenizers["tekken"]
    assert tokenizer.encode("hello")[0] == tokenizer.bos_token_id == CONTROL.index("<s>")
    names = [tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token]
    assert names == ["</s>", "<unk>", "<pad>"]
    assert tokenizer.token_id("never") is None
    assert tokenizer.decode([3, RESERVED + 97, 4, 2], True) == "a"
    assert tokenizer.token_id(f"<SPECIAL_{RESERVED - 1}>") == RESERVED - 1


def test_tekken_files_without_special_tokens_have_those_of_old(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken() | {"special_tokens": None}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("[SYSTEM_PROMPT]", add_special_tokens=False) == [17]
    assert [tokenizer.pad_token_id, tokenizer.token_id("<SPECIAL_20>")] == [11, 20]


# ------------------------------------------------------------ Mistral's instruct format

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning": "why"},
    {"role": "user", "content": "c"},
]


def instruct(tmp_path, version: str) -> Tokenizer:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(version=version)))
    return read(tmp_path)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("v3", "<s>[INST]a[/INST]b</s>[INST]Be brief.\n\nc[/INST]"),
        ("v7", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c[/INST]"),
        ("v11", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]a[/INST]b</s>[INST]c[/INST]"),
        (
            "v13",
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]a[/INST][THINK]why[/THINK]b</s>[INST]c[/INST]",
        ),
    ],
)
def test_a_tekken_file_says_how_a_conversation_is_written(tmp_path, version, text):
    tokenizer = instruct(tmp_path, version)
    assert tokenizer.apply_chat_template([SYSTEM, *TURNS], tokenize=False) == text
    plain = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert plain == "<s>[INST]a[/INST]"
    begun = tokenizer.apply_chat_template([SYSTEM, *TURNS[:2]], tokenize=False, continue_final_message=True)
    assert begun.endswith("a[/INST]b" if version != "v13" else "[/THINK]b") and "Be brief." in begun
    assert tokenizer.apply_chat_template(TURNS).input_ids[:3] == [1, 3, RESERVED + 97]
    for wrong, options, said in (
        ([TURNS[0], TURNS[0]], {}, "must alternate"),
        (TURNS[1:], {}, "must alternate"),
        ([*TURNS[:2], {"role": "tool", "content": "1"}], {}, "must alternate"),
        (TURNS, {"tools": [{"type": "function"}]}, "need a chat template in the folder"),
    ):
        with pytest.raises(ChatTemplateError, match=said):
            tokenizer.apply_chat_template(wrong, **options)


def test_the_folders_template_overrides_the_versions(tmp_path):
    assert instruct(tmp_path, "v15").chat_template is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "own"}')
    assert instruct(tmp_path, "v13").chat_template == "own"


# ------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"IQ== 0\nIg 1\n", "tiktoken.model: line 2 is b'Ig 1', expected a token in base 64 and its rank"),
        (b"IQ== 0\n\n", "tiktoken.model: line 2 is b''"),
        (b"IQ== 0\nIg== 2\n", "the ranks of its 2 tokens are not the numbers from 0 on, each once"),
        (b"IQ== 0\nIQ== 1\n", "the ranks of its 2 tokens are not the numbers"),
        (b"IQ== 0\n", "no token is the byte 0x00, expected one for every byte"),
        (b"", "no token is the byte 0x00"),
    ],
)
def test_a_broken_tiktoken_file_is_named_with_its_line(tmp_path, lines, said):
    write(tmp_path, "kimi")
    (tmp_path / "tiktoken.model").write_bytes(lines)
    with pytest.raises(ValueError, match=re.escape(said)):
        Tokenizer.from_folder(tmp_path)


def test_an_added_token_under_the_id_of_another_is_refused(tmp_path):
    write(tmp_path, "kimi", added_tokens_decoder={"97": {"content": "<s>", "special": True}})
    with pytest.raises(ValueError, match=r"added token '<s>' has id 97"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {}}, "cannot be read as a tekken vocabulary: Object missing required field `pattern`"),
        (tekken(pattern="["), "tekken.json: pattern '[' cannot be used"),
        (tekken(default_vocab_size=900), "322 others, expected default_num_special_tokens=24"),
        (tekken(default_num_special_tokens=3), "has 8 special tokens and"),
        ({"vocab": tekken()["vocab"][1:]}, "the ranks of its 320 tokens are not the numbers from 0 on"),
    ],
)
def test_a_broken_tekken_file_is_named(tmp_path, change, said):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken() | change))
    with pytest.raises(ValueError, match=re.escape(said)):
        Tokenizer.from_folder(tmp_path)
