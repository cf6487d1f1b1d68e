"""Model folders with files that are no files, or nested without end, or too long: one sentence, soon, and no
traceback."""

import json
import shutil
from pathlib import Path

import pytest

from duetto.checkpoints import tensors
from duetto.checkpoints.tensors import CheckpointError, list_tensors
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, load_folder, read_generation_defaults
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

DEPTH = 100_000
NESTED = {"array": "[" * DEPTH + "]" * DEPTH, "object": '{"content":' * DEPTH + "1" + "}" * DEPTH}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return shutil.copytree(DEMO_FOLDER, tmp_path_factory.mktemp("model") / "demo")


@pytest.fixture
def changed(model):
    """Replaces a file of the folder for one test."""
    before = {}

    def change(name: str, text: str | None) -> Path:
        file = model / name
        before[file] = file.read_bytes() if file.exists() else None
        file.unlink(missing_ok=True)
        file.mkdir() if text is None else file.write_text(text)
        return file

    yield change
    for file, content in before.items():
        file.rmdir() if file.is_dir() else file.unlink()
        if content is not None:
            file.write_bytes(content)


def nested(model: Path, name: str, field: str, kind: str) -> str:
    known = json.loads((model / name).read_bytes()) if (model / name).exists() else {}
    return json.dumps(known | {field: "HERE"}).replace('"HERE"', NESTED[kind])


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize(
    "name, field",
    [
        ("tokenizer_config.json", "chat_template"),
        ("tokenizer_config.json", "other"),
        ("tokenizer.json", "model"),
    ],
)
def test_a_tokenizer_that_is_nested_too_deeply(model, changed, name, field, kind):
    file = changed(name, nested(model, name, field, kind))
    with pytest.raises(ValueError, match=str(file)) as error:
        Tokenizer.from_folder(model)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize(
    "name, field", [("config.json", "rope_scaling"), ("generation_config.json", "eos_token_id")]
)
def test_a_configuration_that_is_nested_too_deeply(model, changed, name, field, kind):
    file = changed(name, nested(model, name, field, kind))
    with pytest.raises(CheckpointError, match=str(file)) as error:
        read_generation_defaults(model)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_a_folder(model, changed, name):
    file = changed(name, None)
    with pytest.raises(CheckpointError, match=str(file)):
        load_folder(model, "float32")


def test_weights_that_are_a_folder(model, changed):
    file = changed("model.safetensors", None)
    with pytest.raises(CheckpointError, match=f"{file}: cut off, or not a safetensors file"):
        load_folder(model, "float32")


def test_a_tokenizer_configuration_that_is_a_folder(model, changed):
    file = changed("tokenizer_config.json", None)
    with pytest.raises(ValueError, match=f"{file}: cannot be read"):
        Tokenizer.from_folder(model)


# ------------------------------------------------------------ headers


def safetensors(file: Path, count: int, padding: int = 0) -> Path:
    entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    text = ("{" + ",".join(entry.format(i) for i in range(count)) + "}" + " " * padding).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return file


def never(*args, **kwargs):
    raise AssertionError("the header was parsed")


def test_headers_of_too_many_tensors_are_refused_unparsed(tmp_path, monkeypatch):
    file = safetensors(tmp_path / "a.safetensors", tensors.MAX_TENSORS + 1)
    monkeypatch.setattr(tensors.json, "loads", never)
    monkeypatch.setattr("safetensors.safe_open", never)
    expected = (
        f"{file}: holds {tensors.MAX_TENSORS + 1} tensors, expected at most {tensors.MAX_TENSORS} in one file"
    )
    with pytest.raises(CheckpointError, match=expected):
        list_tensors(file)


def test_headers_that_are_too_long_are_refused_unread(tmp_path, monkeypatch):
    file = safetensors(tmp_path / "a.safetensors", 1, padding=tensors.MAX_HEADER_BYTES)
    monkeypatch.setattr("safetensors.safe_open", never)
    with pytest.raises(
        CheckpointError, match=f"the header has [0-9]+ bytes, expected at most {tensors.MAX_HEADER_BYTES}"
    ):
        list_tensors(file)


@pytest.mark.parametrize("size", [0, 1 << 40, 2**64 - 1])
def test_a_header_whose_length_is_wrong(tmp_path, size):
    file = tmp_path / "a.safetensors"
    file.write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cut off, or not a safetensors file"):
        list_tensors(file)


def test_a_header_within_the_limits_is_read(tmp_path):
    assert len(list_tensors(safetensors(tmp_path / "a.safetensors", 1000))) == 1000
