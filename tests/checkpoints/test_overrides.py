"""Overrides of a folder's configuration: each counts whatever it is called, or is refused by name."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.families.golden import CASES, hub_config
from cases.folders import change_config, config_with, decoder
from safetensors.numpy import load_file, save_file
from suite.marks import full_if

from duetto.checkpoints.configuration.overrides import (
    FIELD_SPELLINGS,
    apply_overrides,
    check_override_effects,
    effective_config,
    get_value,
    merge_fields,
    overridden_folder,
    perturb_value,
)
from duetto.checkpoints.configuration.text_models import TEXT_MODEL_TYPES
from duetto.checkpoints.huggingface import load_hf, read_config, save_hf
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.config import GroupedQuery
from duetto.model.rope import Rope

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
STYLES = {
    "rope_scaling": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "rope_parameters": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "no scaling": {"rope_theta": 5e5},
}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn"} | STRETCHED


def yarn(theta: float) -> Rope:
    return Rope(theta, "yarn", 4.0, original_max_position=16, scale=0.1 * math.log(4) + 1)


def ropes(folder: Path, changes: dict[str, Any]) -> list[Rope | None]:
    """The ropes of a folder's layers with overrides."""
    with overridden_folder(folder, changes) as changed:
        mixers = [layer.mixer for layer in read_config(changed).layers]
    return [mixer.rope for mixer in mixers if isinstance(mixer, GroupedQuery)]


@pytest.fixture(params=STYLES)
def styled(request, folder: Path) -> Path:
    """A folder that states its rope in one of the styles."""
    change_config(folder, **{"rope_theta": "absent", "rope_scaling": "absent"} | STYLES[request.param])
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_parameters": YARN}, yarn(5e5)),
        ({"rope_scaling": YARN}, yarn(5e5)),
        ({"rope_scaling": {"type": "yarn"} | STRETCHED}, yarn(5e5)),
        ({"rope_parameters": YARN | {"rope_theta": 3e5}}, yarn(3e5)),
        ({"rope_parameters": YARN, "rope_theta": 3e5}, yarn(3e5)),
        ({"rope_theta": 3e5, "rope_scaling": YARN}, yarn(3e5)),
        ({"rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, Rope(5e5, "linear", 2.0)),
    ],
    ids=str,
)
def test_rope_overrides_apply_in_either_spelling_and_keep_the_base(styled, changes, expected):
    assert set(ropes(styled, changes)) == {expected}


def test_rope_base_overrides_apply_in_either_spelling(styled):
    (before,) = set(ropes(styled, {}))
    (after,) = set(ropes(styled, {"rope_theta": 3e5}))
    assert before is not None and after is not None
    assert (before.theta, after.theta, after.kind) == (5e5, 3e5, before.kind)


LINEAR = Rope(1e6, "linear", 8.0)
BY_TYPE = {  # of layers without and with a window
    "older": {
        "rope_theta": 1e6, "rope_local_base_freq": 7e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    },
    "today's": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("style", BY_TYPE)
@pytest.mark.parametrize(
    ("changes", "full", "sliding"),
    [
        ({"rope_parameters": {"full_attention": YARN}}, yarn(1e6), Rope(7e3)),
        ({"rope_scaling": YARN}, yarn(1e6), Rope(7e3)),
        ({"rope_theta": 3e5}, Rope(3e5, "linear", 8.0), Rope(7e3)),
        ({"rope_local_base_freq": 3e3}, LINEAR, Rope(3e3)),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            LINEAR, Rope(7e3, "linear", 2.0),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_ropes_of_layer_types_are_replaced_one_by_one(tmp_path, nested, style, changes, full, sliding):
    plain = {n: x for n, x in hub_config("gemma3_text").items() if not n.startswith("rope_")}
    raw = plain | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    raw |= BY_TYPE[style]
    raw = {"model_type": "gemma3", "text_config": raw, "vision_config": {}} if nested else raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ropes(tmp_path, changes) == [sliding, full] * 2
    if nested:
        assert ropes(tmp_path, {"text_config": changes}) == [sliding, full] * 2


def test_fields_of_nested_text_models_are_overridden_on_either_level(tmp_path):
    inner = hub_config("gemma3_text") | {"tie_word_embeddings": True}
    outer = {"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    for changes in ({"tie_word_embeddings": False}, {"text_config": {"tie_word_embeddings": False}}):
        with overridden_folder(tmp_path, changes) as changed:
            assert not read_config(changed).tied_embeddings
            assert json.loads((changed / "config.json").read_text())["model_type"] in TEXT_MODEL_TYPES


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_thetha": 3e5}, "rope_thetha=300000.0 changes nothing: rope_thetha is not read, did you"),
        ({"rope_scaling": YARN | {"beta_fas": 4}}, "rope_scaling.beta_fas=4 changes nothing: beta_fas is"),
        ({"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor=2.0 changes nothing"),
        ({"rope_parameters": YARN, "rope_scaling": LLAMA3}, "rope_parameters.rope_type='yarn' changes"),
        ({"sliding_windoww": None}, "sliding_windoww=None changes nothing"),
        ({"text_config": {"rope_theta": 3e5}}, "text_config.rope_theta=300000.0 changes nothing: text"),
        ({"use_cache": True}, "use_cache=True changes nothing: use_cache is not read"),
        ({"max_position_embedings": 9}, "did you mean max_position_embeddings?"),
        ({1: 2}, "hf_overrides: 1: 2 is not allowed: a name is a string"),
        ({"rope_scaling": YARN | {True: [3]}}, "hf_overrides: True: [3] is not allowed: a name is a string"),
    ],
    ids=str,
)  # fmt: skip
def test_an_override_that_changes_nothing_is_refused_by_name(folder, changes, said):
    with pytest.raises(CheckpointError, match=re.escape(said)), overridden_folder(folder, changes):
        pass


@pytest.mark.parametrize("changes", [{"pad_token_id": 7}, {"vision_config": {"depth": 2}}], ids=str)
def test_a_name_of_another_meaning_is_not_suggested(folder, changes):
    with pytest.raises(CheckpointError, match=r"(pad_token_id|vision_config|depth) is not read$"):
        apply_overrides(folder, changes)


def test_an_override_that_other_fields_outweigh_is_refused(tmp_path):
    raw = hub_config("gemma3_text") | {"layer_types": ["sliding_attention"] * 7, "num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    said = r"sliding_window_pattern=3 changes nothing: other fields of config.json decide"
    with (
        pytest.raises(CheckpointError, match=said),
        overridden_folder(tmp_path, {"sliding_window_pattern": 3}),
    ):
        pass


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("qwen2", {"max_window_layers": 3}),
        ("gemma3_text", {"sliding_window_pattern": 8}),
        ("smollm3 interval", {"no_rope_layer_interval": 4}),
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("qwen3", {"eos_token_id": -1}),
    ],
)
def test_an_override_whose_neighbours_mean_the_same_is_kept(case, changes):
    """Behind the last layer one number means what another does."""
    raw = hub_config(case)
    changed = merge_fields(raw, changes)
    assert effective_config(changed) != effective_config(raw)
    check_override_effects(raw, changes)


def test_an_unknown_family_is_read_as_a_known_one(folder):
    file, expected = folder / "config.json", read_config(folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "yi"}))
    with overridden_folder(folder, {"model_type": "llama"}) as changed:
        assert read_config(changed) == expected


def test_an_override_may_state_what_holds_already(folder):
    stated = json.loads((folder / "config.json").read_text())
    for changes in (stated, {"attention_bias": False}, {"max_position_embeddings": 64}, {"eos_token_id": 3}):
        with overridden_folder(folder, changes) as changed:
            assert read_config(changed) == read_config(folder)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("deepseek_v2", {"num_experts": 2}),
        ("ernie4_5_moe", {"num_experts_per_tok": 1}),
        ("gpt2", {"hidden_size": 60}),
        ("gpt_neox", {"rope_theta": 3e5}),
        ("kimi_linear", {"norm_topk_prob": False}),
        ("qwen2", {"max_model_len": 999}),
    ],
)
def test_a_setting_has_the_names_that_transformers_knows(case, changes):
    raw = hub_config(case)
    check_override_effects(raw, changes)
    assert effective_config(merge_fields(raw, changes)) != effective_config(raw)


@full_if(lambda case: " " in case)
@pytest.mark.parametrize("case", CASES)
def test_no_override_is_lost(case):
    """Whatever its name and the folder's: it has an effect, or is refused."""
    raw = hub_config(case)
    for group in FIELD_SPELLINGS:
        values = (get_value(raw, name.split(".")) for name in group)
        value = perturb_value(next((value for value in values if value is not None), 3))
        for changes in ({name: value} for name in group if "." not in name):
            try:
                check_override_effects(raw, changes)
            except ValueError:
                continue
            assert effective_config(merge_fields(raw, changes)) != effective_config(raw)


def test_an_untied_head_in_a_tied_model_names_the_override(tmp_path):
    config = config_with(tied_embeddings=True)
    save_hf(tmp_path, config, decoder(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"] + np.float32(1)
    save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(CheckpointError, match=r'with \{"tie_word_embeddings": false\} in config.json or hf_'):
        load_hf(tmp_path)
    with overridden_folder(tmp_path, {"tie_word_embeddings": False}) as changed:
        np.testing.assert_array_equal(np.asarray(load_hf(changed)[1].head), head)
