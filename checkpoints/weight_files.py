"""Safetensors files of a folder: one file, shards with an index, or several files without one."""

from fnmatch import fnmatchcase
from pathlib import Path

from ..refusals import quote
from .configuration.text_models import text_tensors
from .families.family import Family
from .folders import missing_file_error, read_json
from .tensors import CheckpointError, Tensor, list_tensors

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PUBLISHER_PATTERN = "consolidated*"  # a second copy of the weights, under the publisher's names


def list_text_tensors(folder: Path, family: Family) -> dict[str, Tensor]:
    """Return the tensors of a folder's text model, under the names of its family. Raises CheckpointError."""
    return add_name_prefix(text_tensors(list_stored_tensors(folder)), family)


def list_stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by name.

    `model.safetensors` takes precedence over an index, and an index over other safetensors files.
    """
    if (folder / SINGLE_FILE).exists():
        return list_tensors(folder / SINGLE_FILE)
    indices = glob_weights(folder, "*.safetensors.index.json")
    if len(indices) > 1:
        raise CheckpointError(f"{indices[1]}: lies beside {indices[0].name}, expected one index")
    return list_indexed_tensors(indices[0]) if indices else merge_tensors(list_weight_files(folder))


def glob_weights(folder: Path, pattern: str) -> list[Path]:
    """Return a folder's files that match a pattern, without copies in a publisher's own format."""
    matches = sorted(f for f in folder.glob(pattern) if not f.name.startswith("."))
    return [f for f in matches if not fnmatchcase(f.name, PUBLISHER_PATTERN)]


def list_weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files that are no adapter. Raises CheckpointError if there is none."""
    files = [f for f in glob_weights(folder, "*.safetensors") if not f.name.startswith("adapter_model")]
    if not files:
        raise missing_file_error(folder, "*.safetensors")
    return files


def merge_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Return the tensors of several files by name. Raises CheckpointError for a name in two of them."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        held = list_tensors(file)
        for name in sorted(set(held) & set(tensors)):
            raise CheckpointError(
                f"{file}: holds tensor {name!r}, which {tensors[name].file.name} holds too, "
                "expected it in one file"
            )
        tensors |= held
    return tensors


def add_name_prefix(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Add the family's prefix to all names if no name has it.

    Files of a model that was saved without its head lack it, as do older files of some families.
    """
    if any(name.startswith(family.prefix) for name in tensors):
        return tensors
    head_prefix = family.head_prefix
    return {n if n.startswith(head_prefix) else family.prefix + n: tensor for n, tensor in tensors.items()}


def list_indexed_tensors(index: Path) -> dict[str, Tensor]:
    """Return the tensors of an index, each from the shard that it names. Raises CheckpointError if they
    disagree."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(
            f"{index}: weight_map is {quote(weight_map)}, expected an object from tensor names to file names"
        )
    shards = sorted(set(weight_map.values()))
    file_names = {file.name for file in index.parent.iterdir() if file.is_file()}
    for shard in shards:
        if shard not in file_names:
            raise CheckpointError(f"{index}: names the shard {quote(shard)}, which is not in the folder")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        file = index.parent / shard
        held = list_tensors(file)
        promised = {name for name, at in weight_map.items() if at == shard}
        for name in sorted(promised - set(held)):
            raise CheckpointError(f"{file}: lacks tensor {name!r}, which {index.name} says it holds")
        for name in sorted(set(held) - promised):
            raise CheckpointError(f"{file}: holds tensor {name!r}, which {index.name} does not place there")
        tensors |= held
    return tensors
