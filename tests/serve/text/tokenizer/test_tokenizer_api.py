"""The tokenizer under Transformers' names: what scripts call, with its results."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError
from duetto.serve.text.tokenizer.tokenizer import MAX_UNBATCHED_CHARS, Tokenizer

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "sat", "user", "assistant", "."]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CHAT = [{"role": "user", "content": "the cat"}]
ID = {word: i for i, word in enumerate(WORDS)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Words, with `<s>` in front, and two tokens that were added."""
    backend = Backend(models.WordLevel(ID, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>", "<tool>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "unk_token": "<unk>", "bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>",
        "additional_special_tokens": ["<tool>"], "chat_template": TEMPLATE,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer.from_folder(tmp_path)
    assert found is not None
    return found


def test_a_call_gives_ids_and_mask_by_key_and_attribute(tokenizer: Tokenizer):
    one = tokenizer("the cat")
    assert one == {"input_ids": [1, 3, 4], "attention_mask": [1, 1, 1]}
    assert one.input_ids is one["input_ids"] and dict(**one) == one
    assert tokenizer("the cat", add_special_tokens=False)["input_ids"] == [3, 4]
    several = tokenizer(["the cat", "sat"], padding=False, truncation=None, return_tensors=None)
    assert several.input_ids == [[1, 3, 4], [1, 5]] and several.attention_mask == [[1, 1, 1], [1, 1]]
    assert tokenizer([]) == {"input_ids": [], "attention_mask": []}
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = one.token_type_ids
    for asked in ({"padding": True}, {"truncation": True}, {"max_length": 5}, {"return_tensors": "pt"}):
        with pytest.raises(ValueError, match=f"{next(iter(asked))}=.* is not supported"):
            tokenizer("the", **asked)


def test_ids_become_text_one_by_one_and_in_lists(tokenizer: Tokenizer):
    ids = [1, 3, 4, 2]
    assert tokenizer.decode(ids) == "<s>thecat</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "thecat"
    assert tokenizer.decode(4) == tokenizer.decode(np.array([4])) == tokenizer.decode(np.int64(4)) == "cat"
    assert tokenizer.decode([]) == "" and tokenizer.batch_decode([]) == []
    assert tokenizer.batch_decode([[1, 3], (4,)], skip_special_tokens=True) == ["the", "cat"]
    assert tokenizer.batch_decode(np.array([[3, 4], [5, 2]])) == tokenizer.decode([[3, 4], [5, 2]])
    assert tokenizer.decode([3], clean_up_tokenization_spaces=False) == "the"


def test_tokens_and_ids_are_found_by_each_other(tokenizer: Tokenizer):
    assert tokenizer.convert_tokens_to_ids("cat") == 4
    assert tokenizer.convert_tokens_to_ids(["cat", "nobody"]) == [4, 0]
    assert tokenizer.convert_ids_to_tokens(4) == "cat"
    assert tokenizer.convert_ids_to_tokens([1, 4, 99]) == ["<s>", "cat", None]
    assert tokenizer.convert_ids_to_tokens(np.array([1, 4]), skip_special_tokens=True) == ["cat"]
    vocabulary = tokenizer.get_vocab()
    assert vocabulary == ID | {"<pad>": 9, "<tool>": 10} and len(vocabulary) == len(tokenizer) == 11
    assert tokenizer.vocab_size == 9


def test_special_tokens_have_names(tokenizer: Tokenizer):
    named = [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "unk", "pad")]
    assert named == ["<s>", "</s>", "<unk>", "<pad>"]
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id] == [1, 2]
    assert [tokenizer.unk_token_id, tokenizer.pad_token_id] == [0, 9]
    assert tokenizer.all_special_tokens == [*named, "<tool>"]
    assert tokenizer.all_special_ids == [1, 2, 0, 9, 10]
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == 2


def test_a_chat_is_an_encoding_ids_or_text(tokenizer: Tokenizer):
    text = tokenizer.apply_chat_template(conversation=CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "user the cat assistant "
    whole = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert whole == {"input_ids": [6, 3, 4, 7], "attention_mask": [1] * 4}
    assert tokenizer.apply_chat_template(CHAT, return_dict=False) == [6, 3, 4]
    several = tokenizer.apply_chat_template([CHAT, CHAT[:1] * 2], return_dict=False)
    assert several == [[6, 3, 4], [6, 3, 4, 6, 3, 4]]
    own = tokenizer.apply_chat_template(CHAT, chat_template="{{ who }}", who="me", tokenize=False)
    assert own == "me"
    with pytest.raises(ValueError, match="return_tensors='pt' is not supported"):
        tokenizer.apply_chat_template(CHAT, return_tensors="pt")


def test_a_final_message_can_be_continued(tokenizer: Tokenizer):
    begun = [*CHAT, {"role": "assistant", "content": "the "}]
    ask = {"tokenize": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(begun, **ask) == "user the cat assistant the "
    begun[1] = {"role": "assistant", "content": "the"}
    assert tokenizer.apply_chat_template(begun, **ask) == "user the cat assistant the"
    with pytest.raises(ChatTemplateError, match="needs add_generation_prompt=False"):
        tokenizer.apply_chat_template(begun, add_generation_prompt=True, **ask)
    with pytest.raises(ChatTemplateError, match="leaves the last message's text out"):
        tokenizer.apply_chat_template(begun, chat_template="x", **ask)


def test_without_names_there_are_none(tmp_path: Path):
    Backend(models.WordLevel(ID, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    plain = Tokenizer.from_folder(tmp_path)
    assert (plain.pad_token, plain.pad_token_id, plain.unk_token_id, plain.all_special_ids) == (
        None,
        None,
        None,
        [],
    )
    assert plain.convert_tokens_to_ids("nobody") is None


@pytest.mark.parametrize("special", [False, True])
def test_long_texts_have_the_tokens_of_short_ones(special):
    """Those are encoded in another way."""
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    text = "def naïve(a, b):\n    return '東京 🤗' * 3  # <|endoftext|>\n" * 200
    ids = tokenizer.encode(text, add_special_tokens=special)
    assert (
        len(text) > MAX_UNBATCHED_CHARS
        and ids == tokenizer._backend.encode(text, add_special_tokens=special).ids
    )
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode(text + "\ud800")


def test_threads_run_while_a_long_text_is_encoded():
    """A server's event loop is one: of a text of one word nothing could be awaited otherwise."""
    tokenizer, looks = Tokenizer.from_folder(DEMO_FOLDER), 0
    with ThreadPoolExecutor(1) as other:
        done = other.submit(tokenizer.encode, "x" * 500_000)
        while not done.done():
            time.sleep(0.001)
            looks += 1
    assert looks > 20
