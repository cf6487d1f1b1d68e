"""Added tokens that only files beside `tokenizer.json` have: known as Transformers' tokenizers know them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from duetto import SamplingParams
from duetto.sampling_params import StructuredOutputsParams
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

PLAIN = {"bos_token": "<bos>"}
BASE = Tokenizer.from_folder(DEMO_FOLDER)
assert BASE is not None


def entry(token: str, **flags: bool) -> dict[str, Any]:
    stated = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return stated | {"content": token, "special": True} | flags


def tokenizer(folder: Path, config: dict[str, Any], **files: Any) -> Tokenizer:
    """The demo model's vocabulary beside other files."""
    shutil.copy(DEMO_FOLDER / "tokenizer.json", folder)
    for name, content in ({"tokenizer_config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = Tokenizer.from_folder(folder)
    assert found is not None
    return found


ADDED: dict[str, tuple[dict[str, Any], list[str]]] = {  # and the tokens that get the next ids
    "by id": ({"added_tokens_decoder": {"9001": entry("<b>"), "9000": entry("<a>")}}, ["<a>", "<b>"]),
    "named": ({"pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<pad>"}, ["<eos>", "<pad>"]),
    "of the model's own": ({"image_token": "<img>", "add_bos_token": False}, ["<img>"]),
    "additional": ({"additional_special_tokens": ["<x>", {"content": "<y>"}]}, ["<x>", "<y>"]),
    "extra": ({"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}, ["<x>"]),
    "extra by name": ({"extra_special_tokens": {"audio_token": "<x>"}}, ["<x>"]),
    "all": (
        {"added_tokens_decoder": {"9000": entry("<a>")}, "eos_token": "<e>", "extra_special_tokens": ["<x>"]},
        ["<a>", "<e>", "<x>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ADDED)
def test_tokens_that_only_the_configuration_has_are_known(case, tmp_path):
    config, expected = ADDED[case]
    found, first = tokenizer(tmp_path, config), len(BASE)
    ids = list(range(first, first + len(expected)))
    assert [found.token_id(token) for token in expected] == ids and len(found) == first + len(ids)
    assert found.encode("".join(expected), add_special_tokens=False) == ids
    text = f"Once{expected[0]} upon"
    assert found.decode(found.encode(text, add_special_tokens=False)) == text
    assert found.decode(ids, skip_special_tokens=True) == ""
    assert found.special_ids.issuperset(ids)


def test_flags_of_the_configuration_count(tmp_path):
    flags = {"special": False, "lstrip": True}
    found = tokenizer(tmp_path, {"added_tokens_decoder": {"9000": entry("<a>", **flags)}})
    i = len(BASE)
    assert found.encode("x  <a>", add_special_tokens=False) == [*BASE.encode("x", False), i]
    assert i not in found.special_ids and found.decode([i], skip_special_tokens=True) == "<a>"


def test_an_end_token_keeps_its_flags_and_is_special(tmp_path):
    stated = {"9000": entry("<e>", special=False, lstrip=True)}
    found = tokenizer(tmp_path, {"added_tokens_decoder": stated, "eos_token": "<e>"})
    assert found.encode("x  <e>", False) == [*BASE.encode("x", False), len(BASE)]
    assert found.eos_token_id == len(BASE) and len(BASE) in found.special_ids


def test_an_end_token_that_the_model_lacks_changes_nothing(tmp_path):
    words, V = tokenizer(tmp_path, {"eos_token": "<e>"}), len(BASE)
    assert words.eos_token_id == V
    intake = InputProcessor(V, 64, EngineOptions(), words, (V, 0))
    assert intake.eos_ids == (0,)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Once", "upon"]))
    (request,) = intake.make_subscription("Once", params).requests
    assert request.eos_ids == (0,) and request.constraint is not None


def test_older_files_count_without_the_configurations_list(tmp_path):
    beside = {"added_tokens": {"<p>": 9001, "<q>": 9000}, "special_tokens_map": {"eos_token": "<q>"}}
    found, first = tokenizer(tmp_path, PLAIN, **beside), len(BASE)
    known = [found.token_id(token) for token in ("<q>", "<p>")]
    assert known == [first, first + 1] and found.eos_token == "<q>"
    assert first in found.special_ids and first + 1 not in found.special_ids
    alone = tokenizer(tmp_path, {"added_tokens_decoder": {}}, **beside)
    assert (len(alone), alone.eos_token) == (first, None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": {"9000": {"content": 5}}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is malformed"),
        ({"extra_special_tokens": [5]}, r"extra_special_tokens is \[5\], which is no token"),
        ({"extra_special_tokens": "x"}, "extra_special_tokens is 'x', which is no token"),
    ],
    ids=str,
)
def test_a_malformed_token_is_refused(config, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        tokenizer(tmp_path, config)
