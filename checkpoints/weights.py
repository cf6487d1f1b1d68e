"""The safetensors files of a folder: one, shards with an index, or several that share nothing."""

from fnmatch import fnmatchcase
from pathlib import Path

from ..refusals import shown
from .families.family import Family
from .folders import read_json, without
from .nested import text_tensors
from .tensors import CheckpointError, Tensor, contents

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PUBLISHERS = "consolidated*"  # the same weights once more, under names of their own


def find_tensors(folder: Path, family: Family) -> dict[str, Tensor]:
    """The tensors of a folder's text model by the names that the family has for them. Raises
    CheckpointError."""
    return renamed(text_tensors(stored(folder)), family)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder. `model.safetensors` counts before an index, and an index before whatever other
    safetensors files there are."""
    if (folder / SINGLE).exists():
        return contents(folder / SINGLE)
    indices = plain(folder, "*.safetensors.index.json")
    if len(indices) > 1:
        raise CheckpointError(f"{indices[1]}: lies beside {indices[0].name}, expected one index")
    return find_shards(indices[0]) if indices else gathered(weights(folder))


def plain(folder: Path, pattern: str) -> list[Path]:
    """A folder's files of a pattern, without those that are a second copy in a publisher's own format."""
    found = sorted(f for f in folder.glob(pattern) if not f.name.startswith("."))
    return [f for f in found if not fnmatchcase(f.name, PUBLISHERS)]


def weights(folder: Path) -> list[Path]:
    files = [f for f in plain(folder, "*.safetensors") if not f.name.startswith("adapter_model")]
    if not files:
        raise without(folder, "*.safetensors")
    return files


def gathered(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of several files, each in one of them only."""
    found: dict[str, Tensor] = {}
    for file in files:
        held = contents(file)
        for name in sorted(set(held) & set(found)):
            raise CheckpointError(
                f"{file}: holds tensor {name!r}, which {found[name].file.name} holds too, "
                "expected it in one file"
            )
        found |= held
    return found


def renamed(tensors: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Older checkpoints of a family may lack the first part of every name."""
    prefix = family.prefix
    if not prefix or any(name.startswith(prefix) for name in tensors):
        return tensors
    head = family.names["head"].name
    return {name if name == head else prefix + name: tensor for name, tensor in tensors.items()}


def find_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index promises, each in the shard that it names; the two must agree."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(
            f"{index}: weight_map is {shown(places)}, expected an object from tensor names to file names"
        )
    shards = sorted(set(places.values()))
    here = {file.name for file in index.parent.iterdir() if file.is_file()}
    for shard in shards:
        if shard not in here:
            raise CheckpointError(f"{index}: names the shard {shown(shard)}, which is not in the folder")
    found: dict[str, Tensor] = {}
    for shard in shards:
        file = index.parent / shard
        held = contents(file)
        promised = {name for name, at in places.items() if at == shard}
        for name in sorted(promised - set(held)):
            raise CheckpointError(f"{file}: lacks tensor {name!r}, which {index.name} says it holds")
        for name in sorted(set(held) - promised):
            raise CheckpointError(f"{file}: holds tensor {name!r}, which {index.name} does not place there")
        found |= held
    return found
