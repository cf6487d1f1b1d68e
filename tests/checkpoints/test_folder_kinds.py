"""Folders as people have them: weights under any name load, and what is no checkpoint is named for what it
is.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.folders import decoder
from cases.models import TINY
from safetensors.numpy import load_file, save_file

from duetto.checkpoints.huggingface import load_hf, read_config, save_hf
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.tree import leaves_by_path
from duetto.serve.engine.startup.model_folder import load_folder
from duetto.serve.engine.startup.model_source import NO_TOKENIZER, ModelSource
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_hf(folder, TINY, decoder(TINY), jnp.float32)
    return folder


@pytest.fixture
def tensors(whole: Path, tmp_path: Path) -> Tensors:
    """The model's tensors by name; its `config.json` is in the test's folder."""
    shutil.copy(whole / "config.json", tmp_path)
    return load_file(whole / "model.safetensors")


def same(folder: Path, whole: Path) -> bool:
    pairs = zip(jax.tree.leaves(load_hf(folder)), jax.tree.leaves(load_hf(whole)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_hf(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# --- weights


@pytest.mark.parametrize(
    "name", ["pytorch_model.safetensors", "model-00001-of-00001.safetensors", "x.safetensors"]
)
def test_one_file_of_any_name_loads(tensors: Tensors, whole: Path, tmp_path: Path, name: str):
    save_file(tensors, tmp_path / name)
    assert same(tmp_path, whole)


def test_several_files_without_an_index_load(tensors: Tensors, whole: Path, tmp_path: Path):
    for i, half in enumerate(halves(tensors)):
        save_file(half, tmp_path / f"model-0000{i + 1}-of-00002.safetensors")
    assert same(tmp_path, whole)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "is missing" in refusal(tmp_path)


def test_an_index_of_another_name_is_used(tensors: Tensors, whole: Path, tmp_path: Path):
    first, second = halves(tensors)
    save_file(first, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    save_file(second, tmp_path / "old.safetensors")
    places = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert same(tmp_path, whole)
    shutil.copy(tmp_path / "x.safetensors.index.json", tmp_path / "y.safetensors.index.json")
    assert "y.safetensors.index.json: lies beside x.safetensors.index.json" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_refused(tensors: Tensors, tmp_path: Path):
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    said = "b.safetensors: holds tensor 'model.norm.weight', which a.safetensors holds too"
    assert said in refusal(tmp_path)


NESTED = {  # names of a text model's tensor, as the hub's folders and as transformers 5 have them
    "hub": lambda name: f"language_model.{name}",
    "transformers": lambda name: (
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    ),
    "base model": lambda name: name.replace("model.", "language_model.", 1),
    "SmolVLM": lambda name: name.replace("model.", "model.text_model.", 1),
}


@pytest.mark.parametrize("style", NESTED)
def test_the_text_model_of_an_image_model_loads(
    tensors: Tensors, whole: Path, tmp_path: Path, capsys, style: str
):
    raw = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "llava", "text_config": raw, "vision_config": {"hidden_size": 7}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    beside = {"vision_tower.embeddings.weight": np.zeros((7, 3), np.float32)}
    nested = {NESTED[style](name): tensor for name, tensor in tensors.items()}
    save_file(nested | beside, tmp_path / "model.safetensors")
    assert read_config(tmp_path) == read_config(whole)
    assert same(tmp_path, whole)
    load_folder(tmp_path, "float32")
    assert "of a folder of llava the text's model is read" in capsys.readouterr().err


def test_text_beside_a_tower_loads(tensors: Tensors, tmp_path: Path):
    """Folders of Qwen2-VL and Qwen2.5-VL on the hub."""
    raw = json.loads((tmp_path / "config.json").read_text())
    flat = raw | {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 7}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    biases = {
        f"{name.removesuffix('weight')}bias": np.ones(len(tensor), np.float32)
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    beside = {"visual.patch_embed.proj.weight": np.zeros((7, 3), np.float32)}
    save_file(tensors | biases | beside, tmp_path / "model.safetensors")
    params = load_folder(tmp_path, "float32")[1]
    assert (leaves_by_path(params)["layers.0.attention.q_bias"] == 1).all()


def test_a_copy_in_a_publishers_format_is_not_mixed_in(tensors: Tensors, whole: Path, tmp_path: Path):
    first, second = halves(tensors)
    for file, half in (
        ("model-1.safetensors", first),
        ("model-2.safetensors", second),
        ("._x.safetensors", first),
    ):
        save_file(half, tmp_path / file)
    save_file({"tok_embeddings.weight": tensors["model.norm.weight"]}, tmp_path / "consolidated.safetensors")
    assert same(tmp_path, whole)


# --- what is no checkpoint


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model-Q4.gguf"], "model-Q4.gguf: a GGUF file, which is not read: give the model's own"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "adapter_config.json: a PEFT adapter, not a model: merge",
        ),
        (["model_index.json", "unet.txt"], "model_index.json: a Diffusers pipeline"),
        (["pytorch_model.bin"], "pytorch_model.bin: pickled weights are refused"),
        (["params.json", "consolidated.safetensors"], "consolidated.safetensors: a publisher's own format"),
        (["tf_model.h5"], "tf_model.h5: weights of another library"),
        (["snapshots/abc/config.json"], "snapshots: a model's place in the hub's cache"),
        (["README.md"], "holds no config.json, expected a folder of a Hugging Face checkpoint"),
        ([], "holds no config.json, expected a folder of a Hugging Face checkpoint, it is empty"),
    ],
    ids=str,
)
@pytest.mark.parametrize("described", [False, True], ids=["alone", "beside config.json"])
def test_errors_name_the_kind_of_a_folder(whole: Path, tmp_path: Path, names, said: str, described: bool):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    if described:
        shutil.copy(whole / "config.json", tmp_path)
        said = said.replace("config.json, expected", "*.safetensors, expected").removesuffix(", it is empty")
    said = said.replace("adapter_*.safetensors", "adapter_config.json")
    assert said in refusal(tmp_path)


def test_errors_name_the_kind_of_a_path(whole: Path, tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf: a GGUF file" in refusal(tmp_path / "model.gguf")
    assert "model.safetensors: a file, expected the folder that it lies in" in refusal(
        whole / "model.safetensors"
    )
    (tmp_path / "llama-8b").mkdir()
    assert f"no such folder: did you mean {tmp_path / 'llama-8b'}?" in refusal(tmp_path / "llama8b")
    assert f"no such folder, nor is there a folder {tmp_path / 'models'}" in refusal(
        tmp_path / "models" / "x"
    )
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(Is a directory\)"):
        read_config(tmp_path)


# --- tokenizers that are not read

UNKNOWN = "a tiktoken vocabulary of an unknown tokenizer_class (known: TikTokenTokenizer, QWenTokenizer)"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("tiktoken.model", UNKNOWN),
        ("qwen.tiktoken", UNKNOWN),
        ("vocab.txt", "a WordPiece vocabulary"),
        ("tokenization_kimi.py", "the model's own code"),
    ],
)
def test_unsupported_tokenizers_are_reported_at_load_and_in_errors(
    tmp_path: Path, capsys, name: str, what: str
):
    (tmp_path / name).write_text("")
    words, lacking = ModelSource(tmp_path, tmp_path).load_tokenizer()
    (line,) = capsys.readouterr().err.splitlines()
    assert words is None and line.startswith(f"duetto: {tmp_path / name} is {what}, which is not read")
    assert lacking.startswith(f"{NO_TOKENIZER} ({tmp_path / name} is {what}")
    with pytest.raises(ValueError, match=f"has no tokenizer.json.*{re.escape(what)}"):
        ModelSource(tmp_path, tmp_path, is_tokenizer_of_model=False).load_tokenizer()


def test_a_folder_without_a_tokenizer_prints_no_warning(tmp_path: Path, capsys):
    assert ModelSource(tmp_path, tmp_path).load_tokenizer() == (None, NO_TOKENIZER)
    assert capsys.readouterr().err == ""


def test_a_tiktoken_file_under_sentencepieces_name_is_named(tmp_path: Path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match=r"tokenizer\.model is a tiktoken vocabulary, which is not read"):
        Tokenizer.from_folder(tmp_path)
