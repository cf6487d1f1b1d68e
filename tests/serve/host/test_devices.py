"""What jax is told before it looks for devices: how much of an NVIDIA GPU's memory it takes."""

import os

import pytest

from duetto.serve.host import devices


@pytest.mark.parametrize("files, fraction", [(("null",), "0.95"), (("nothing*",), None)])
def test_only_an_nvidia_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], fraction: str | None
):
    monkeypatch.setattr(devices, "is_jax_initialized", lambda: False)
    monkeypatch.setattr(devices, "NVIDIA_FILES", files)
    for name in devices.MEMORY_SETTINGS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    devices.default_device()
    assert os.environ.get(devices.MEMORY_SETTINGS[0]) == fraction
