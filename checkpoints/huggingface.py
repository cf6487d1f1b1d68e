"""Hugging Face folders, in and out: `config.json`, `generation_config.json` and safetensors weights.

A folder is refused, in one sentence that names the file and the field or tensor, rather than half understood.
Pickled weights are never read. Loading streams: beside the model itself the host holds a few megabytes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.config import ModelConfig
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import Spec, is_spec, paths
from .families import FAMILIES, Family
from .families.fields import shown
from .families.stored import Stored
from .tensors import FLOATS, CheckpointError, Tensor, aligned, contents, read, same_bytes, write

DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load(
    path: str | Path, dtype: Any = "auto", place: Callable[[np.ndarray], Any] = jax.device_put
) -> tuple[ModelConfig, Decoder]:
    """The model in a Hugging Face folder: safetensors in one file, or in shards with an index.

    `dtype` is that of the parameters; "auto" is the checkpoint's own. `place` puts one parameter on its devices; the
    numpy array that it gets is its to keep, and on a CPU becomes the parameter itself.
    Raises CheckpointError for what is missing, surplus, misshapen, cut off or not finite.
    """
    folder = Path(path)
    family, raw, config = read_model(folder)
    tensors, wanted = find_tensors(folder), parameters(family, config)
    check(folder, family, wanted, tensors)
    chosen = choose_dtype(dtype, raw, tensors[family.NAMES["embed"].name], folder)
    leaves: dict[str, Any] = {}
    for p in sorted(wanted, key=lambda p: (tensors[p.name].file, tensors[p.name].start)):
        array = aligned(p.spec.shape, chosen)
        read(tensors[p.name], p.stored.view(array))
        leaves[p.path] = jax.block_until_ready(place(array))
    treedef = jax.tree.structure(decoder_spec(config), is_leaf=is_spec)
    return config, jax.tree.unflatten(treedef, [leaves[p.path] for p in wanted])


def save(path: str | Path, config: ModelConfig, params: Decoder, dtype: Any = None) -> None:
    """Write a folder that `load` and transformers read: `config.json` in the hub's style and `model.safetensors`.

    `dtype` casts; None keeps the parameters' own, which must then be one for all. Token ids are left to a
    `generation_config.json`. Raises ValueError where the parameters are not those of the configuration.
    """
    folder, family = Path(path), FAMILIES["llama"]
    raw, leaves, wanted = family.export(config), paths(params), parameters(family, config)
    if family.config(raw) != config:
        raise ValueError(f"a config.json cannot express {config}")
    check_leaves({p.path: p.spec.shape for p in wanted}, leaves)
    chosen = known_dtype(one_dtype(leaves) if dtype is None else dtype)
    raw |= {"torch_dtype": str(chosen), "bos_token_id": None, "eos_token_id": None}
    shapes = {p.name: p.stored.shape(p.spec.shape) for p in wanted}
    folder.mkdir(parents=True, exist_ok=True)
    write(
        folder / "model.safetensors",
        shapes,
        (p.stored.view(np.asarray(leaves[p.path])) for p in wanted),
        chosen,
    )
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def read_config(path: str | Path) -> ModelConfig:
    """The sizes of the model in a folder, from its `config.json` in either style.

    Raises CheckpointError for a missing or wrong field, and for what is not supported, with the field and its value.
    """
    return read_model(Path(path))[2]


def read_model(folder: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    file = folder / "config.json"
    raw = read_json(file)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{file}: model_type is {shown(kind)}, expected one of {', '.join(FAMILIES)}")
    try:
        return FAMILIES[kind], raw, FAMILIES[kind].config(raw)
    except ValueError as e:
        raise CheckpointError(f"{file}: {e}") from e


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CheckpointError(f"{file}: no such file, expected a folder of a Hugging Face checkpoint") from e
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(f"{file}: not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(found).__name__}, expected an object")
    return found


@dataclass(frozen=True)
class Parameter:
    """One of our parameters, and its tensor in the checkpoint."""

    path: str
    spec: Spec
    stored: Stored
    name: str


def parameters(family: Family, config: ModelConfig) -> list[Parameter]:
    """Every parameter that a model of this configuration has, in the order of the tree's leaves."""

    def parameter(path: str, spec: Spec) -> Parameter:
        stored = family.NAMES[re.sub(r"\b\d+\b", "{}", path)]
        return Parameter(path, spec, stored, stored.name.format(*re.findall(r"\b\d+\b", path)))

    return [parameter(path, spec) for path, spec in paths(decoder_spec(config)).items()]


def known_dtype(dtype: Any) -> np.dtype:
    try:
        return DTYPES[str(np.dtype(dtype))]
    except (TypeError, KeyError) as e:
        raise ValueError(f"dtype is {shown(dtype)}, expected 'auto' or one of {', '.join(DTYPES)}") from e


def choose_dtype(dtype: Any, raw: Mapping[str, Any], embed: Tensor, folder: Path) -> np.dtype:
    """The dtype asked for; for "auto" the one that config.json names, or else that of the stored embedding."""
    if not isinstance(dtype, str) or dtype != "auto":
        return known_dtype(dtype)
    named = raw.get("dtype") or raw.get("torch_dtype") or str(embed.dtype)
    found = DTYPES.get(str(named).removeprefix("torch."))
    if found is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: dtype is {shown(named)}, expected one of {', '.join(DTYPES)}"
        )
    return found


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return contents(single)
    if index.exists():
        return find_shards(index)
    for pattern in ("*.bin", "*.pt", "*.pth"):
        for file in folder.glob(pattern):
            raise CheckpointError(
                f"{file}: pickled weights are refused, because reading them can run any code: "
                "convert them to safetensors"
            )
    raise CheckpointError(f"{folder}: holds neither {single.name} nor {index.name}")


def find_shards(index: Path) -> dict[str, Tensor]:
    """The tensors that an index promises, each in the shard that it names; the two must agree."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(
            f"{index}: weight_map is {shown(places)}, expected an object from tensor names to file names"
        )
    shards = sorted(set(places.values()))
    for shard in shards:
        if Path(shard).name != shard or not (index.parent / shard).is_file():
            raise CheckpointError(f"{index}: names the shard {shard!r}, which is not in the folder")
    found: dict[str, Tensor] = {}
    for shard in shards:
        file = index.parent / shard
        held, promised = contents(file), {name for name, at in places.items() if at == shard}
        for name in sorted(promised - set(held)):
            raise CheckpointError(f"{file}: lacks tensor {name!r}, which {index.name} says it holds")
        for name in sorted(set(held) - promised):
            raise CheckpointError(f"{file}: holds tensor {name!r}, which {index.name} does not place there")
        found |= held
    return found


def check(folder: Path, family: Family, wanted: list[Parameter], tensors: dict[str, Tensor]) -> None:
    """Every parameter must be stored in its shape, and nothing else but what is known to change nothing."""
    for p in wanted:
        expected = p.stored.shape(p.spec.shape)
        if p.name not in tensors:
            raise CheckpointError(f"{folder}: tensor {p.name!r} is missing, expected one of shape {expected}")
        found = tensors[p.name]
        if found.shape != expected:
            raise CheckpointError(
                f"{found.file}: tensor {p.name!r} has shape {found.shape}, expected {expected}"
            )
        if found.code not in FLOATS:
            raise CheckpointError(
                f"{found.file}: tensor {p.name!r} has dtype {found.code}, expected one of {', '.join(FLOATS)}"
            )
    for name in sorted(set(tensors) - {p.name for p in wanted}):
        if not any(re.fullmatch(pattern, name) for pattern in family.IGNORED):
            check_surplus(tensors[name], family, tensors)


def check_surplus(tensor: Tensor, family: Family, tensors: dict[str, Tensor]) -> None:
    """A tied model may store its output matrix beside its embedding, if the two are equal."""
    if tensor.name != family.NAMES["head"].name:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} is not a parameter of this model")
    if not same_bytes(tensor, tensors[family.NAMES["embed"].name]):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is not the embedding, which tie_word_embeddings says it is"
        )


def check_leaves(expected: dict[str, tuple[int, ...]], leaves: dict[str, Any]) -> None:
    found = {path: leaf.shape for path, leaf in leaves.items()}
    for path in expected | found:
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"parameter {path} has shape {found.get(path)}, the configuration says {expected.get(path)}"
            )


def one_dtype(leaves: dict[str, Any]) -> np.dtype:
    dtypes = {np.dtype(leaf.dtype) for leaf in leaves.values()}
    if len(dtypes) > 1:
        raise ValueError(
            f"the parameters have dtypes {', '.join(sorted(map(str, dtypes)))}: say which to write"
        )
    return dtypes.pop()


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says of its use: the tokens that end a text, and its authors' sampling parameters."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)


def generation_defaults(path: str | Path) -> GenerationDefaults:
    """From `generation_config.json`; token ids that it does not give are those of `config.json`.

    `sampling` holds the parameters that the file states; it is empty where the file says `"do_sample": false`. Raises
    CheckpointError for a value of the wrong type.
    """
    files = [Path(path) / "generation_config.json", Path(path) / "config.json"]
    stated = {file: read_json(file) for file in files if file.exists() or file.name == "config.json"}
    bos, eos = token_ids(stated, "bos_token_id"), token_ids(stated, "eos_token_id")
    own = stated.get(files[0], {})
    names = () if own.get("do_sample") is False else SAMPLING
    sampling = {name: own[name] for name in names if own.get(name) is not None}
    for name, value in sampling.items():
        if type(value) is not int and (type(value) is not float or name == "top_k"):
            kind = "an integer" if name == "top_k" else "a number"
            raise CheckpointError(f"{files[0]}: {name} is {shown(value)}, expected {kind}")
    return GenerationDefaults(eos, bos[0] if bos else None, sampling)


def token_ids(stated: Mapping[Path, Mapping[str, Any]], name: str) -> tuple[int, ...]:
    """The ids of the first file that gives any."""
    for file, raw in stated.items():
        value = raw.get(name)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise CheckpointError(f"{file}: {name} is {shown(value)}, expected a token id or a list of them")
        return tuple(ids)
    return ()
