"""Folders that appear complete or not at all, and the files that describe a model beside its weights."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..refusals import quote
from .configuration.text_models import is_nested, text_fields
from .tensors import CheckpointError

DESCRIPTION_PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tiktoken.model",
    "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json", "LICENSE*", "NOTICE*",
    "1_Pooling/config.json", "modules.json",
)  # fmt: skip

MODELOPT_FILE = "hf_quant_config.json"  # not copied: it describes the weights


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` when the block ends.

    All files are synced to the disk before the rename. The folder is called `NAME.partial-PID` until then. It
    is removed if the block fails, and stays if the process is killed. Raises CheckpointError if `target`
    exists and is not an empty folder.
    """
    require_free(target)
    partial = target.absolute().with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as e:
        raise CheckpointError(f"{target}: no folder can be made there ({e.strerror})") from e
    try:
        yield partial
        for file in list_files(partial):
            with open(partial / file, "rb") as f:
                os.fsync(f.fileno())
        require_free(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_free(target: Path) -> None:
    """Raise CheckpointError unless a folder can be moved to `target`: a new name, or an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already, expected a new name or an empty folder")
    if target.is_symlink() and not target.exists():
        raise CheckpointError(f"{target}: is a link to nothing, expected a new name or an empty folder")
    if target.resolve() == Path.cwd():
        raise CheckpointError(
            f"{target}: is the working directory, expected a new name or another empty folder"
        )


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted."""
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def copy_description(source: Path, target: Path) -> None:
    """Copy configuration, tokenizer, chat template and licence of a model's folder to another folder."""
    for pattern in DESCRIPTION_PATTERNS:
        for file in filter(Path.is_file, source.glob(pattern)):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's `config.json`; of a multimodal model, the fields of its text model.

    Raises CheckpointError. If there is no `config.json`, the error names what the folder holds instead.
    """
    file = folder / "config.json"
    if not file.exists():
        raise missing_config_error(folder)
    return add_modelopt_fields(folder, text_fields(read_json(file), file))


def add_modelopt_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the `quantization_config` that ModelOpt wrote beside them, unless they have one.

    Raises CheckpointError.
    """
    file = folder / MODELOPT_FILE
    if "quantization_config" in raw or not file.exists():
        return raw
    stated = read_json(file).get("quantization")
    if not isinstance(stated, dict):
        raise CheckpointError(f"{file}: quantization is {quote(stated)}, expected an object")
    return raw | {"quantization_config": {"quant_method": "modelopt", **stated}}


def outer_model_type(folder: Path) -> str | None:
    """Return the `model_type` of a folder whose text model is part of a multimodal model, or None."""
    raw = read_json(folder / "config.json")
    return raw["model_type"] if is_nested(raw) else None


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:  # ValueError also for integers of thousands of digits
        raise CheckpointError(f"{file}: not valid JSON ({e})") from e
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(content).__name__}, expected an object")
    return content


# ---------------------------------------------------------------- folders that are no checkpoint

HF_FOLDER_HINT = "give the model's own Hugging Face folder, with config.json and *.safetensors"
FOREIGN_FILES = (
    (
        ("adapter_config.json", "adapter_model.safetensors"),
        "a PEFT adapter, not a model: merge it into its base model (merge_and_unload, then save_pretrained)",
    ),
    (("model_index.json",), "a Diffusers pipeline: only models that write text can be read"),
    (("*.gguf",), f"a GGUF file, which is not read: {HF_FOLDER_HINT}"),
    (
        ("*.bin", "*.pt", "*.pth", "*.bin.index.json"),
        "pickled weights are refused, because reading them can run any code: convert them to safetensors",
    ),
    (
        ("params.json", "consolidated*.safetensors"),
        f"a publisher's own format, not Hugging Face's: {HF_FOLDER_HINT}",
    ),
    (("*.h5", "*.msgpack", "*.onnx", "saved_model.pb"), f"weights of another library: {HF_FOLDER_HINT}"),
    (("snapshots",), "a model's place in the hub's cache: give the folder of one of its snapshots"),
)  # fmt: skip


def identify_foreign_format(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first name that identifies a folder's format, and the explanation; None if no name does."""
    names = sorted(names)
    for patterns, meaning in FOREIGN_FILES:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return name, meaning
    return None


def missing_config_error(path: Path) -> CheckpointError:
    """Return the error for a path without a `config.json`."""
    if not path.exists():
        return CheckpointError(f"{path}: no such folder{suggest_folder(path)}")
    if not path.is_dir():
        meaning = (
            identify_foreign_format([path.name]) or ("", "a file, expected the folder that it lies in")
        )[1]
        return CheckpointError(f"{path}: {meaning}")
    return missing_file_error(path, "config.json")


def missing_file_error(folder: Path, missing: str) -> CheckpointError:
    """Return the error for a folder that lacks the file `missing`; it names the folder's format if that is
    known."""
    identity = identify_foreign_format(file.name for file in folder.iterdir())
    if identity is not None:
        return CheckpointError(f"{folder / identity[0]}: {identity[1]}")
    state = "" if any(folder.iterdir()) else ", it is empty"
    return CheckpointError(
        f"{folder}: holds no {missing}, expected a folder of a Hugging Face checkpoint{state}"
    )


def suggest_folder(path: Path) -> str:
    """Return a suggestion, as the end of an error, for a path that does not exist."""
    parent = path.parent
    if not parent.is_dir():
        return f", nor is there a folder {parent}"
    similar = get_close_matches(path.name, [f.name for f in parent.iterdir() if f.is_dir()], 1)
    return f": did you mean {parent / similar[0]}?" if similar else ""
