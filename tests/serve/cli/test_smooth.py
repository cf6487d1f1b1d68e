"""`duetto convert --smooth`: what it writes, says and refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases.compare import same_params
from cases.families.golden import case_folder
from suite.fixtures import Model

from duetto.checkpoints import huggingface, orbax
from duetto.checkpoints.folders import list_files
from duetto.model.config import ModelConfig
from duetto.model.ffn import FFN
from duetto.model.tree import leaves_by_path, map_by_path
from duetto.model.weights.compression import smoothing
from duetto.model.weights.compression.compress import quantize_params
from duetto.model.weights.compression.smoothing import find_input_norms, measure_norm_outputs, smooth_params
from duetto.serve.cli import convert
from duetto.serve.cli.convert import convert_model
from duetto.serve.cli.main import main
from duetto.serve.jobs import calibration as texts


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    """Two texts of 9 and 40 tokens."""
    draw = np.random.default_rng(0).integers(0, 250, 40).tolist()
    return write_lines(
        tmp_path / "texts.jsonl", {"prompt": draw[:9]}, {"id": "a", "prompt_token_ids": draw, "max_tokens": 3}
    )


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights can be read."""
    monkeypatch.setattr(convert, "read_model", None)


def test_weights_are_smoothed_then_quantised(source, calibration, tmp_path, capsys):
    flags = ["--smooth", calibration]
    assert main(["convert", str(source), str(tmp_path / "smooth"), *flags]) == 0
    said = capsys.readouterr().err
    assert f"smoothing by {calibration}: 2 prompts of at most 128, 49 tokens" in said
    config, params = huggingface.load_hf(source)
    norms = find_input_norms(config)
    texts = [json.loads(line) for line in Path(calibration).read_text().splitlines()]
    maxima: dict[str, Any] = {}
    for ids in (text.get("prompt") or text["prompt_token_ids"] for text in texts):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        values = measure_norm_outputs(
            params, config, tuple(norm.path for norm in norms), jnp.asarray(tokens), jnp.int32(len(ids))
        )
        maxima = {path: np.maximum(maxima.get(path, 0), x) for path, x in values.items()}
    expected = smooth_params(params, norms, maxima)
    assert not same_params(expected, params)
    assert same_params(orbax.load_orbax(tmp_path / "smooth")[1], expected)
    convert_model(source, tmp_path / "int8", quantization="int8", smooth=calibration)
    assert same_params(orbax.load_orbax(tmp_path / "int8")[1], quantize_params(expected, "int8"))
    convert_model(tmp_path / "smooth", tmp_path / "hub", "huggingface")
    assert same_params(huggingface.load_hf(tmp_path / "hub")[1], expected)


def test_texts_are_cut_and_counted(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "MAX_TEXTS", 2)
    monkeypatch.setattr(texts, "MAX_TEXT_TOKENS", 5)
    file = write_lines(tmp_path / "texts", {"prompt": [1] * 7}, "\n", {"prompt": [2, 3]}, "no JSON\n")
    convert_model(source, tmp_path / "new", smooth=file)
    assert "2 prompts of at most 2, 7 tokens, at most 5 of a prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "No such file"),
        ([], "there is no prompt in it"),
        (["\n", "  \n"], "there is no prompt in it"),
        ([{"prompt": [1]}, "{'prompt'}\n"], "line 2: the line is not JSON"),
        ([{"prompt": [1]}, "\n", {"text": "x"}], "line 3: "),
        ([{"prompt": [1], "messages": []}], "line 1: a line needs one of prompt"),
        ([{"prompt": []}], "line 1: "),
        ([{"prompt": [5, 99999]}], "line 1: token 99999 is not allowed: 0 to "),
        ([{"prompt": [5, -1]}], "line 1: token -1 is not allowed: 0 to "),
        (['"' + "a" * (8 << 20) + '"\n'], "line 1: the line has 8388611 bytes, at most 8388608 are allowed"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_invalid_calibrations_are_refused_before_weights(lines, said, source, tmp_path, capsys):
    file = tmp_path / "texts"
    if lines is not None:
        write_lines(file, *lines)
    assert main(["convert", str(source), str(tmp_path / "new"), "--smooth", str(file)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and said in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_quantised_sources_need_to_be_widened_first(source, calibration, tmp_path, monkeypatch):
    convert_model(source, tmp_path / "int8", quantization="int8")
    convert_model(tmp_path / "int8", tmp_path / "wide", quantization="dequantize", smooth=calibration)
    assert not orbax.describe_records(orbax.load_orbax(tmp_path / "wide")[1])
    monkeypatch.setattr(convert, "read_model", None)
    for quantization in (None, "int8", "int4"):
        with pytest.raises(
            ValueError, match=r"layers.0.attention.q is int8: only arrays can be smoothed, unl"
        ):
            convert_model(tmp_path / "int8", tmp_path / "new", quantization=quantization, smooth=calibration)


def test_outputs_that_are_not_finite_are_named(tiny: Model, calibration, tmp_path):
    huge = map_by_path(
        tiny.params, (), lambda path, x: jnp.full_like(x, 3e38) if path == "layers.1.ffn_norm.gain" else x
    )
    (folder := tmp_path / "hub").mkdir()
    huggingface.save_hf(folder, tiny.config, huge, "float32")
    with pytest.raises(ValueError, match="line 1: the output of layers.1.ffn_norm holds NaN or infinity"):
        convert_model(folder, tmp_path / "new", smooth=calibration)
    assert list_files(tmp_path / "new") == []


def test_norms_that_are_left_are_named(tmp_path, capsys):
    texts = write_lines(tmp_path / "texts", {"prompt": [5, 6, 7]})
    for name in ("olmo2", "qwen3_next"):
        (tmp_path / name).mkdir()
        case_folder(name, tmp_path / name)
    assert main(["convert", str(tmp_path / "olmo2"), str(tmp_path / "new"), "--smooth", texts]) == 1
    error = capsys.readouterr().err
    assert (
        "no norm of this model can be smoothed; no gain to fold factors into: layers.0.attention_norm"
        in error
    )
    convert_model(tmp_path / "qwen3_next", tmp_path / "new", smooth=texts)
    assert "not smoothed, no weight that can be quantised reads it: layers.0.attention_norm" in (
        capsys.readouterr().err
    )
    config, params = huggingface.load_hf(tmp_path / "qwen3_next")
    smoothed = leaves_by_path(orbax.load_orbax(tmp_path / "new")[1])
    for norm in find_input_norms(config):
        gain = f"{norm.path}.gain"
        assert np.array_equal(smoothed[gain], leaves_by_path(params)[gain]) == bool(norm.obstacle)


def test_norms_that_read_unknown_weights_are_left(monkeypatch):
    known = {kind: names for kind, names in smoothing.INPUT_WEIGHTS.items() if kind is not FFN}
    monkeypatch.setattr(smoothing, "INPUT_WEIGHTS", known)
    config = ModelConfig.uniform(50, 8, 16, 1, 2, 1, 4)
    apart, shared = (
        [norm.obstacle for norm in find_input_norms(c)]
        for c in (config, replace(config, parallel="one norm"))
    )
    assert apart == ["", smoothing.UNKNOWN_READER] and shared == [smoothing.UNKNOWN_READER]
