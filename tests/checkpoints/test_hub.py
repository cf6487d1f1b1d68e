"""Models by their ids: only what is needed is fetched, what was fetched is found again offline, and refusals
say what to do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from cases.folders import decoder
from cases.models import TINY
from cases.requests import SIZES
from fakes.hub import Hub, Repository, serve
from huggingface_hub import constants
from suite.fixtures import ROOT

from duetto import LLM, SamplingParams
from duetto.checkpoints.hub import resolve_model
from duetto.checkpoints.huggingface import save_hf
from duetto.checkpoints.tensors import CheckpointError
from duetto.serve.cli.buckets import read_request_lengths
from duetto.serve.engine.startup.model_source import ModelSource
from duetto.serve.options.engine import EngineOptions

WORDS = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
NEEDED = {"config.json", "generation_config.json", "model.safetensors", *WORDS}
USELESS = {
    "pytorch_model.bin", "model.gguf", "onnx/model.onnx", "original/params.json", "consolidated.safetensors",
    "README.md", "training_args.bin", "original/consolidated.00.pth",
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model with the demo's tokenizer, and much that is not needed."""
    folder = tmp_path_factory.mktemp("tiny")
    save_hf(folder, TINY, decoder(TINY), jnp.float32)
    found = {f.name: f.read_bytes() for f in folder.iterdir()}
    demo = ROOT / "checkpoints" / "demo"
    found |= {name: (demo / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    found |= {"generation_config.json": b'{"max_new_tokens": 7}', "special_tokens_map.json": b"{}"}
    return found | {"chat_template.jinja": b"{{ messages }}"} | dict.fromkeys(USELESS, b"x" * 10)


@pytest.fixture
def hub(files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    older = files | {"generation_config.json": b'{"max_new_tokens": 5, "eos_token_id": [9]}'}
    repositories = {
        "org/tiny": Repository({"main": files, "v1": older}),
        "org/private": Repository({"main": files}, token="secret"),
        "org/gated": Repository({"main": files}, gated=True),
        "org/pickled": Repository({"main": {"config.json": b"{}", "pytorch_model.bin": b""}}),
        "org/gguf": Repository({"main": {"model-Q4_K_M.gguf": b""}}),
        "org/adapter": Repository({"main": {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}}),
    }
    with serve(Hub(repositories)) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield served


def refusal(model: str, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        resolve_model(model, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_only_what_is_needed_is_fetched_and_nothing_twice(hub: Hub, files):
    folder = resolve_model("org/tiny")
    assert {str(f.relative_to(folder)) for f in folder.rglob("*")} == NEEDED == hub.fetched()
    assert all((folder / name).read_bytes() == files[name] for name in NEEDED)
    hub.asked.clear()
    assert resolve_model("org/tiny") == folder
    assert [path for _, path, _ in hub.asked] == ["api/models/org/tiny"]


def test_a_tokenizer_alone_comes_without_weights(hub: Hub):
    folder = resolve_model("org/tiny", weights=False)
    assert hub.fetched() == NEEDED - {"model.safetensors"}
    assert resolve_model("org/tiny") == folder and (folder / "model.safetensors").exists()


def test_revisions_and_download_folders_are_used(hub: Hub, tmp_path: Path):
    here = resolve_model("org/tiny", "v1", download_dir=tmp_path / "here")
    assert here.is_relative_to(tmp_path / "here") and b"5" in (here / "generation_config.json").read_bytes()
    commit = hub.repositories["org/tiny"].commit("v1")
    assert here.name == commit and resolve_model("org/tiny", commit).name == commit
    assert "it has no revision 'v9'" in refusal("org/tiny", revision="v9")


def test_the_token_is_sent_and_its_lack_is_explained(hub: Hub):
    said = refusal("org/private")
    assert f"there is none at {hub.url}, or it is private: then give hf_token" in said
    assert resolve_model("org/private", token="secret").is_dir()
    assert {token for _, path, token in hub.asked if "org/private/resolve" in path} == {"secret"}
    assert f"it is gated: accept its terms at {hub.url}/org/gated" in refusal("org/gated")


def test_without_the_hub_the_cache_is_used_and_said(hub: Hub, monkeypatch, capsys):
    folder = resolve_model("org/tiny")
    capsys.readouterr()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert resolve_model("org/tiny") == folder
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("duetto: org/tiny: http://127.0.0.1:9 does not answer") and str(folder) in line
    said = refusal("org/other")
    assert "org/other: no such folder, nor is there a folder org" in said
    assert "does not answer" in said and "the cache has no snapshot" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/tiny") == folder
    assert "org/tiny: HF_HUB_OFFLINE is set; the snapshot in the cache is used" in capsys.readouterr().err


def test_half_a_snapshot_is_completed_and_offline_refused(hub: Hub, monkeypatch):
    folder = resolve_model("org/tiny")
    (folder / "model.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert "the cache has no snapshot" in refusal("org/tiny")
    assert (resolve_model("org/tiny") / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/pickled", "org/pickled: pytorch_model.bin: pickled weights are refused"),
        ("org/gguf", "org/gguf: model-Q4_K_M.gguf: a GGUF file, which is not read"),
        ("org/adapter", "org/adapter: adapter_config.json: a PEFT adapter, not a model"),
        ("org/nothing", "org/nothing: no such folder, nor is there a folder org; as an id: there is none at"),
    ],
)
def test_what_is_no_checkpoint_is_said_before_anything_is_fetched(hub: Hub, model: str, said: str):
    assert said in refusal(model)
    assert hub.fetched() == set()


def test_existing_paths_are_not_looked_up_on_the_hub(hub: Hub, tmp_path: Path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    for path in ("org/tiny", Path("org/other"), "./org/other", "/org/other", "a/b/c", "org/", "C:\\x"):
        assert resolve_model(path) == Path(path)
    assert resolve_model("~/model") == Path.home() / "model"
    assert hub.asked == []
    assert "did you mean org/tiny?" in refusal("org/tiiny")


def test_a_model_a_draft_and_a_tokenizer_by_their_ids(hub: Hub, tmp_path: Path):
    where = {"download_dir": tmp_path / "here", "token": "secret"}
    origin = ModelSource.resolve_names("org/tiny", "org/private", revision="v1", **where)
    assert origin.model_folder.is_relative_to(tmp_path / "here") and origin.tokenizer_folder.is_relative_to(
        tmp_path / "here"
    )
    assert not (origin.tokenizer_folder / "model.safetensors").exists()
    same = ModelSource.resolve_names("org/tiny", tokenizer_revision="v1", **where)
    assert same.tokenizer_folder == origin.model_folder and same.is_tokenizer_of_model
    chosen = EngineOptions(speculative_config={"model": "org/private", "num_speculative_tokens": 2})
    draft = origin.resolve_options(chosen, **where).speculation.model
    assert Path(draft).is_relative_to(tmp_path / "here") and (Path(draft) / "model.safetensors").exists()


@pytest.mark.usefixtures("few_shapes")
def test_an_id_is_served_and_its_texts_end(hub: Hub, tmp_path: Path):
    with LLM("org/tiny", revision="v1", download_dir=tmp_path / "here", hf_token="x", **SIZES) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=5)
        end = llm.get_tokenizer().eos_token_id  # no other file names it
        forced = [SamplingParams(temperature=0, max_tokens=4, logit_bias={i: 1000.0}) for i in (end, 9, 8)]
        found = [o.outputs[0] for o in llm.generate([[5, 6, 7]] * 3, forced, use_tqdm=False)]
    assert [list(c.token_ids) for c in found] == [[end], [9], [8] * 4]
    assert [(c.finish_reason, c.stop_reason) for c in found] == [
        ("stop", None),
        ("stop", 9),
        ("length", None),
    ]
    assert {token for _, _, token in hub.asked} == {"x"}


@pytest.mark.full
def test_a_command_downloads_by_id_and_the_next_runs_offline(hub: Hub, tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "duetto.serve.cli.main",
        "plan",
        "--model",
        "org/tiny",
        "--compile",
        "none",
        "--json",
    ]
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}

    def planned(**more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | own | more
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=True, env=environment
        )

    online = planned()
    assert hub.fetched() == NEEDED and "Fetching" in online.stderr
    offline = planned(HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set; the snapshot in the cache is used" in offline.stderr
    assert json.loads(offline.stdout)["memory"] == json.loads(online.stdout)["memory"]


def test_buckets_are_chosen_with_the_tokenizer_of_an_id(hub: Hub, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "import os"}\n')
    assert read_request_lengths(str(tmp_path / "in.jsonl"), resolve_model("org/tiny", weights=False))
