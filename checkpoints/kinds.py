"""Folders and files that are no checkpoint that can be read: named for what they are, with what to do
instead.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from .tensors import CheckpointError

ORIGINAL = "give the model's own Hugging Face folder, with config.json and *.safetensors"
KINDS = (
    (
        ("adapter_config.json", "adapter_model.safetensors"),
        "a PEFT adapter, not a model: merge it into its base model (merge_and_unload, then save_pretrained)",
    ),
    (("model_index.json",), "a Diffusers pipeline: only models that write text can be read"),
    (("*.gguf",), f"a GGUF file, which is not read: {ORIGINAL}"),
    (
        ("*.bin", "*.pt", "*.pth", "*.bin.index.json"),
        "pickled weights are refused, because reading them can run any code: convert them to safetensors",
    ),
    (
        ("params.json", "consolidated*.safetensors"),
        f"a publisher's own format, not Hugging Face's: {ORIGINAL}",
    ),
    (("*.h5", "*.msgpack", "*.onnx", "saved_model.pb"), f"weights of another library: {ORIGINAL}"),
    (("snapshots",), "a model's place in the hub's cache: give the folder of one of its snapshots"),
)  # fmt: skip


def named(names: Iterable[str]) -> tuple[str, str] | None:
    """The first of a folder's names that says what the folder is, and what that is; None where none does."""
    names = sorted(names)
    for patterns, what in KINDS:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return name, what
    return None


def not_a_checkpoint(path: Path) -> CheckpointError:
    """Why a path without a `config.json` cannot be loaded."""
    if not path.exists():
        return CheckpointError(f"{path}: no such folder{near(path)}")
    if not path.is_dir():
        what = (named([path.name]) or ("", "a file, expected the folder that it lies in"))[1]
        return CheckpointError(f"{path}: {what}")
    return without(path, "config.json")


def without(folder: Path, missing: str) -> CheckpointError:
    """Why a folder that lacks something cannot be loaded."""
    found = named(file.name for file in folder.iterdir())
    if found is not None:
        return CheckpointError(f"{folder / found[0]}: {found[1]}")
    state = "" if any(folder.iterdir()) else ", it is empty"
    return CheckpointError(
        f"{folder}: holds no {missing}, expected a folder of a Hugging Face checkpoint{state}"
    )


def near(path: Path) -> str:
    """Suggest a folder for a path that does not exist."""
    parent = path.parent
    if not parent.is_dir():
        return f", nor is there a folder {parent}"
    found = get_close_matches(path.name, [f.name for f in parent.iterdir() if f.is_dir()], 1)
    return f": did you mean {parent / found[0]}?" if found else ""
