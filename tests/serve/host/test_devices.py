"""What XLA is told before jax looks for devices: duetto's flags for GPUs, and never over the user's."""

import os

import pytest

from duetto.serve.host import devices

SPLIT = "--xla_gpu_experimental_force_split_k=1"
OURS = f"--xla_gpu_enable_command_buffer=+WHILE {SPLIT}"


@pytest.mark.parametrize(
    "given, told",
    [
        (None, OURS),
        ("", OURS),
        ("--xla_gpu_autotune_level=0", f"--xla_gpu_autotune_level=0 {OURS}"),
        ("--xla_gpu_enable_command_buffer=", f"--xla_gpu_enable_command_buffer= {SPLIT}"),
        ("--xla_gpu_enable_command_buffer_x=1", f"--xla_gpu_enable_command_buffer_x=1 {OURS}"),
    ],
)
def test_flags_are_added_to_the_users(monkeypatch: pytest.MonkeyPatch, given: str | None, told: str):
    monkeypatch.setattr(devices, "is_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", given or "")
    if given is None:
        monkeypatch.delenv("XLA_FLAGS")
    devices.set_gpu_flags()
    devices.set_gpu_flags()
    assert os.environ["XLA_FLAGS"] == told


def test_nothing_is_told_that_xla_would_not_hear(monkeypatch: pytest.MonkeyPatch):
    devices.default_device()
    assert devices.is_started()
    monkeypatch.setenv("XLA_FLAGS", "--before")
    devices.set_gpu_flags()
    assert os.environ["XLA_FLAGS"] == "--before"


@pytest.mark.parametrize("files, told", [(("null",), OURS), (("nothing*",), "")])
def test_only_an_nvidia_gpu_is_told(monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], told: str):
    monkeypatch.setattr(devices, "is_started", lambda: False)
    monkeypatch.setattr(devices, "NVIDIA_FILES", files)
    monkeypatch.setenv("XLA_FLAGS", "")
    devices.default_device()
    assert os.environ["XLA_FLAGS"] == told
