"""A small model in both kinds of folders."""

import shutil
from pathlib import Path

import pytest
from suite.fixtures import ROOT

from duetto.checkpoints import huggingface
from duetto.serve.cli.main import main


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny) -> Path:
    """A Hugging Face folder of a small random model, in bfloat16, with the demo's tokenizer files beside
    it."""
    folder = tmp_path_factory.mktemp("model") / "hub"
    huggingface.save_hf(folder, tiny.config, tiny.params, "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ROOT / "checkpoints" / "demo" / name, folder)
    (folder / "LICENSE.txt").write_text("as you like")
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    assert main(["convert", str(source), str(source.parent / "orbax")]) == 0
    return source.parent / "orbax"
