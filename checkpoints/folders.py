"""Folders that are either whole or not there, and the files that describe a model beside its weights."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .nested import is_nested, text_config
from .tensors import CheckpointError

DESCRIBING = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tiktoken.model",
    "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json", "LICENSE*", "NOTICE*",
    "1_Pooling/config.json", "modules.json",
)  # fmt: skip


@contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """A folder to write into; it takes the name `target` at once when the block ends, all of it on the disk
    by then.

    Until then it lies beside it as `NAME.partial-PID`; that is removed where the block fails, and left where
    the process is killed. Raises CheckpointError where there is something under the name already, an empty
    folder excepted.
    """
    require_free(target)
    partial = target.absolute().with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as e:
        raise CheckpointError(f"{target}: no folder can be made there ({e.strerror})") from e
    try:
        yield partial
        for file in files(partial):
            with open(partial / file, "rb") as f:
                os.fsync(f.fileno())
        require_free(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already, expected a new name or an empty folder")
    if target.is_symlink() and not target.exists():
        raise CheckpointError(f"{target}: is a link to nothing, expected a new name or an empty folder")
    if target.resolve() == Path.cwd():
        raise CheckpointError(
            f"{target}: is the working directory, expected a new name or another empty folder"
        )


def files(folder: Path) -> list[str]:
    """All files below a folder, by their paths in it."""
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def copy_description(source: Path, target: Path) -> None:
    """Copy what a model's folder holds beside its weights: configuration, tokenizer, chat template,
    licence."""
    for pattern in DESCRIBING:
        for file in filter(Path.is_file, source.glob(pattern)):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def read_config_json(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, those of the text's model where it reads images as well. Raises
    CheckpointError, where there is none with what the folder is.
    """
    file = folder / "config.json"
    if not file.exists():
        raise not_a_checkpoint(folder)
    return text_config(read_json(file), file)


def nested_in(folder: Path) -> str | None:
    """The `model_type` of a folder whose text model is nested in a larger one, or None."""
    raw = read_json(folder / "config.json")
    return raw["model_type"] if is_nested(raw) else None


def read_json(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises CheckpointError."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:  # Python refuses integers of thousands of digits, too
        raise CheckpointError(f"{file}: not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(found).__name__}, expected an object")
    return found


@contextmanager
def overridden(folder: Path, changes: Mapping[str, Any] | None) -> Iterator[Path]:
    """The folder, or one of links to its files whose config.json has these fields in place of its own.

    Raises CheckpointError for a folder without config.json.
    """
    if not changes:
        yield folder
        return
    raw = read_config_json(folder) | dict(changes)
    with TemporaryDirectory(prefix=f"{folder.name}-overridden-") as own:
        for file in folder.iterdir():
            if file.name != "config.json":
                Path(own, file.name).symlink_to(file.resolve())
        Path(own, "config.json").write_text(json.dumps(raw))
        try:
            yield Path(own)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(own, f"{folder}")) from error


# ---------------------------------------------------------------- folders that are no checkpoint

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
