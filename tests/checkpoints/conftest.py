"""What tests of checkpoints share."""

from pathlib import Path

import pytest
from cases.folders import CONFIG, decoder

from duetto.checkpoints.huggingface import save_hf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint as save() writes it."""
    save_hf(tmp_path, CONFIG, decoder(CONFIG))
    return tmp_path
