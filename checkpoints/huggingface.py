"""Hugging Face folders, in and out: `config.json`, `generation_config.json` and safetensors weights.

A folder is refused, in one sentence that names the file and the field or tensor, rather than half understood.
Pickled weights are never read. Loading streams: beside the model itself the host holds a few megabytes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.compress import compressed_at, form_spec, plan_for
from ..model.config import ModelConfig
from ..model.sharding import fitted
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, paths
from .codes import keep
from .families import FAMILIES, UNSUPPORTED, llama
from .families.family import Family
from .families.fields import MAX_COUNT, shown
from .placement import Group, groups
from .quantised import check_config, sources
from .tensors import FLOATS, CheckpointError, Source, Tensor, aligned, contents, read, same_numbers, write

DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load(
    path: str | Path,
    dtype: Any = "auto",
    shardings: Any = None,
    place: Callable[[np.ndarray, Any], Any] = jax.device_put,
    quantization: str | None = None,
) -> tuple[ModelConfig, Decoder]:
    """The model in a Hugging Face folder: safetensors in one file, or in shards with an index.

    `dtype` is that of the parameters; "auto" is the checkpoint's own. `shardings` is one for all, or a tree of the parameters'
    structure (`model.sharding`); by default everything lies on the default device. `place` puts one array where its sharding
    says; the numpy array that it gets is its to keep, and on a CPU becomes the parameter itself. `quantization` is one of
    `model.compress.FORMS`: by default codes are kept as they are stored, where records can hold them in less memory.
    Raises CheckpointError for what is missing, surplus, misshapen, cut off or not finite.
    """
    found = find(Path(path), dtype)
    where, plan = placement(shardings), plan_for(quantization)

    def put(array: Any, own: Any) -> Any:
        return jax.block_until_ready(place(array, fitted(own, array.shape)))

    def placed(group: Group) -> dict[str, Any]:
        kept = keep(group, found.tensors, found.dtype, quantization)
        arrays = kept.read() if kept else read_group(group, found.tensors, found.dtype)
        return {name: jax.tree.map(partial(put, own=where(name)), leaf) for name, leaf in arrays.items()}

    leaves: dict[str, Any] = {}
    for group in found.in_order:
        leaves |= {name: compressed_at(name, leaf, plan, donate=True) for name, leaf in placed(group).items()}
    return found.config, found.tree(leaves)


def read_specs(path: str | Path, dtype: Any = "auto", quantization: str | None = None) -> Decoder:
    """The structure of what `load` gives, of specs; no weight is read. Raises CheckpointError."""
    raw, config = read_model(Path(path))[1:]
    if raw.get("quantization_config") is None:
        return form_spec(config, quantization)
    found, plan, leaves = find(Path(path), dtype), plan_for(quantization), {}
    for group in found.wanted:
        kept = keep(group, found.tensors, found.dtype, quantization)
        leaves |= (
            kept.specs() if kept else {p.path: compressed_at(p.path, p.spec, plan) for p in group.parameters}
        )
    return found.tree(leaves)


@dataclass(frozen=True)
class Found:
    """A folder's model before its weights are read: sizes, the tensors by name, the parameters in them, and their dtype."""

    config: ModelConfig
    tensors: Mapping[str, Source]
    wanted: list[Group]
    dtype: np.dtype

    @property
    def in_order(self) -> list[Group]:
        """Parameters in the order of the files."""

        def place(group: Group) -> tuple[Path, int]:
            first = self.tensors[group.names[0]]
            return first.file, first.start

        return sorted(self.wanted, key=place)

    def tree(self, leaves: Mapping[str, Any]) -> Decoder:
        specs = decoder_spec(self.config)
        treedef = jax.tree.structure(specs, is_leaf=is_spec)
        return jax.tree.unflatten(treedef, [leaves[path] for path in paths(specs)])


def find(folder: Path, dtype: Any) -> Found:
    """Everything about a folder but its numbers. Raises CheckpointError for what is missing, surplus or misshapen."""
    family, raw, config = read_model(folder)
    tensors = sources(raw, find_tensors(folder, family))
    if config.num_layers > len(tensors):  # one is missing; to list those of thousands of layers takes long
        raise CheckpointError(
            f"{folder / 'config.json'}: a model of {config.num_layers} layers, but only {len(tensors)} tensors are stored"
        )
    wanted = groups(family, config)
    check(folder, family, config, wanted, tensors)
    return Found(
        config, tensors, wanted, choose_dtype(dtype, raw, tensors[family.names["embed"].name], folder)
    )


def placement(shardings: Any) -> Callable[[str], Any]:
    """The sharding of a parameter by its path, from one for all, a tree of the parameters' structure, or None."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return lambda path: shardings
    return paths(shardings).__getitem__


def read_group(group: Group, tensors: Mapping[str, Source], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Parameters that are stored together, by path."""
    arrays = [aligned(p.spec.shape, np.dtype(p.spec.dtype or dtype)) for p in group.parameters]
    for i, name in enumerate(group.names):
        read(tensors[name], group.parts(arrays, i))
    return {p.path: array for p, array in zip(group.parameters, arrays, strict=True)}


def save(
    path: str | Path,
    config: ModelConfig,
    params: Decoder,
    dtype: Any = None,
    like: str | Path | Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `load` and transformers read: `config.json` and `model.safetensors`.

    `dtype` casts; None keeps the parameters' own, which must then be one for all. `like` is a folder or the fields of a
    `config.json` that describe this model, to write a folder of the same family; without it the model is written as a
    Llama, its token ids left to a `generation_config.json`. Raises ValueError where the parameters are not those of the
    configuration, or the fields do not describe it.
    """
    folder = Path(path)
    family, raw = described(config, like)
    leaves, wanted = paths(params), groups(family, config)
    check_leaves({p.path: p.spec.shape for group in wanted for p in group.parameters}, leaves)
    own = {p.path: np.dtype(p.spec.dtype) for group in wanted for p in group.parameters if p.spec.dtype}
    chosen = known_dtype(one_dtype(leaves, own) if dtype is None else dtype)
    raw |= {"dtype" if "dtype" in raw else "torch_dtype": str(chosen)}
    places = [(group, i, name) for group in wanted for i, name in enumerate(group.names)]
    shapes = {name: (group.shape, own.get(group.parameters[0].path, chosen)) for group, _, name in places}
    folder.mkdir(parents=True, exist_ok=True)
    joined = (g.parts([np.asarray(leaves[p.path]) for p in g.parameters], i) for g, i, _ in places)
    write(folder / "model.safetensors", shapes, joined)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def described(
    config: ModelConfig, like: str | Path | Mapping[str, Any] | None
) -> tuple[Family, dict[str, Any]]:
    """The family to write, and the fields of its `config.json`."""
    if like is None:
        raw = llama.export(config) | {"bos_token_id": None, "eos_token_id": None}
        if FAMILIES["llama"].config(raw) != config:
            raise ValueError(f"a config.json cannot express {config}")
        return FAMILIES["llama"], raw
    raw = dict(like) if isinstance(like, Mapping) else read_json(Path(like) / "config.json")
    raw.pop("quantization_config", None)
    family = FAMILIES[model_type(raw)]
    if family.config(raw) != config:
        raise ValueError(f"like describes another model than the configuration {config}")
    return family, raw


def read_config(path: str | Path) -> ModelConfig:
    """The sizes of the model in a folder, from its `config.json` in either style.

    Raises CheckpointError for a missing or wrong field, and for what is not supported, with the field and its value.
    """
    return read_model(Path(path))[2]


def read_model(folder: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    file = folder / "config.json"
    raw = read_json(file)
    try:
        check_config(raw)
        family = FAMILIES[model_type(raw)]
        return family, raw, family.config(raw)
    except ValueError as e:
        raise CheckpointError(f"{file}: {e}") from e


def model_type(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise ValueError(f"model_type is {shown(kind)}, {UNSUPPORTED[kind]}")
    raise ValueError(f"model_type is {shown(kind)}, expected one of {', '.join(FAMILIES)}")


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CheckpointError(f"{file}: no such file, expected a folder of a Hugging Face checkpoint") from e
    except (ValueError, RecursionError) as e:  # Python refuses integers of thousands of digits, too
        raise CheckpointError(f"{file}: not valid JSON ({e})") from e
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(found).__name__}, expected an object")
    return found


def known_dtype(dtype: Any) -> np.dtype:
    try:
        return DTYPES[str(np.dtype(dtype))]
    except (TypeError, KeyError) as e:
        raise ValueError(f"dtype is {shown(dtype)}, expected 'auto' or one of {', '.join(DTYPES)}") from e


def choose_dtype(dtype: Any, raw: Mapping[str, Any], embed: Source, folder: Path) -> np.dtype:
    """The dtype asked for; for "auto" the one that config.json names, or else that of the stored embedding."""
    named = raw.get("dtype") or raw.get("torch_dtype") or str(embed.dtype)
    found = DTYPES.get(str(named).removeprefix("torch."))
    if found is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: dtype is {shown(named)}, expected one of {', '.join(DTYPES)}"
        )
    return found if isinstance(dtype, str) and dtype == "auto" else known_dtype(dtype)


def find_tensors(folder: Path, family: Family) -> dict[str, Tensor]:
    """The tensors of a folder by the names that the family has for them."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return renamed(contents(single), family)
    if index.exists():
        return renamed(find_shards(index), family)
    for pattern in ("*.bin", "*.pt", "*.pth", "*.bin.index.json"):
        for file in folder.glob(pattern):
            raise CheckpointError(
                f"{file}: pickled weights are refused, because reading them can run any code: "
                "convert them to safetensors"
            )
    raise CheckpointError(f"{folder}: holds neither {single.name} nor {index.name}")


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
        held, promised = contents(file), {name for name, at in places.items() if at == shard}
        for name in sorted(promised - set(held)):
            raise CheckpointError(f"{file}: lacks tensor {name!r}, which {index.name} says it holds")
        for name in sorted(set(held) - promised):
            raise CheckpointError(f"{file}: holds tensor {name!r}, which {index.name} does not place there")
        found |= held
    return found


def check(
    folder: Path, family: Family, config: ModelConfig, wanted: list[Group], tensors: Mapping[str, Source]
) -> None:
    """Every parameter must be stored in its shape, and nothing else but what is known to change nothing."""
    for group in wanted:
        expected = group.shape
        for name in group.names:
            if name not in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is missing, expected one of shape {expected}"
                )
            check_tensor(tensors[name], expected)
    for name in sorted(set(tensors) - {name for group in wanted for name in group.names}):
        if not is_ignored(name, family, config):
            check_surplus(tensors[name], name, family, tensors)


def check_tensor(found: Source, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise CheckpointError(
            f"{found.file}: tensor {found.name!r} has shape {found.shape}, expected {expected}"
        )
    if found.dtype is None:
        raise CheckpointError(
            f"{found.file}: tensor {found.name!r} has dtype {found.code}, expected one of {', '.join(FLOATS)}"
        )


def is_ignored(name: str, family: Family, config: ModelConfig) -> bool:
    """Whether a tensor is known to change nothing; a group named `beyond` matches only layers past the last."""
    found = next((m for pattern in family.ignored if (m := re.fullmatch(pattern, name))), None)
    if found is None:
        return False
    beyond = found.groupdict().get("beyond")
    return beyond is None or int(beyond) >= config.num_layers


def check_surplus(tensor: Source, name: str, family: Family, tensors: Mapping[str, Source]) -> None:
    """A tied model may store its output matrix beside its embedding, if the two are equal."""
    if name != family.names["head"].name:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} is not a parameter of this model")
    if not same_numbers(tensor, tensors[family.names["embed"].name]):
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


def one_dtype(leaves: dict[str, Any], own: Mapping[str, np.dtype]) -> np.dtype:
    """That of all parameters but those which have their own."""
    dtypes = {np.dtype(leaf.dtype) for path, leaf in leaves.items() if path not in own}
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

    `sampling` holds the parameters that the file states; where it says `"do_sample": false` sampling is greedy, and only the
    repetition penalty is taken, as in transformers. Raises CheckpointError for a value of the wrong type.
    """
    files = [Path(path) / "generation_config.json", Path(path) / "config.json"]
    stated = {file: read_json(file) for file in files if file.exists() or file.name == "config.json"}
    bos, eos = token_ids(stated, "bos_token_id"), token_ids(stated, "eos_token_id")
    own = stated.get(files[0], {})
    greedy = own.get("do_sample") is False
    names = ("repetition_penalty",) if greedy else SAMPLING
    sampling = {name: own[name] for name in names if own.get(name) is not None}
    for name, value in sampling.items():
        if type(value) is not int and (type(value) is not float or name == "top_k"):
            kind = "an integer" if name == "top_k" else "a number"
            raise CheckpointError(f"{files[0]}: {name} is {shown(value)}, expected {kind}")
    return GenerationDefaults(
        eos, bos[0] if bos else None, sampling | ({"temperature": 0.0} if greedy else {})
    )


def token_ids(stated: Mapping[Path, Mapping[str, Any]], name: str) -> tuple[int, ...]:
    """The ids of the first file that gives any."""
    for file, raw in stated.items():
        value = raw.get(name)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i <= MAX_COUNT for i in ids):
            raise CheckpointError(
                f"{file}: {name} is {shown(value)}, expected a token id or a list of them, each at most {MAX_COUNT}"
            )
        return tuple(ids)
    return ()
