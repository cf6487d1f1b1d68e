"""Hugging Face folders, in and out: `config.json` and safetensors weights.

A folder is refused, in one sentence that names the file and the field or tensor, rather than half understood.
Pickled weights are never read. Loading streams: beside the model itself the host holds a few megabytes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.config import GroupedQuery, ModelConfig
from ..model.sharding import fitted, place_at
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, paths
from ..model.weights.compress import compressed_at, form_spec, plan_for
from ..refusals import shown
from .families import FAMILIES, llama
from .families.family import Family
from .folders import read_config_json
from .layout import ParameterGroup, groups
from .quantised.codes import keep
from .quantised.config import check_config, sources
from .tensors import FLOATS, CheckpointError, TensorSource, aligned, read, same_numbers, write
from .weights import find_tensors

DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}


def load(
    path: str | Path,
    dtype: Any = "auto",
    shardings: Any = None,
    place: Callable[[np.ndarray, Any], Any] = place_at,
    quantization: str | None = None,
    track: Callable[[list[ParameterGroup]], Iterable[ParameterGroup]] = iter,
) -> tuple[ModelConfig, Decoder]:
    """The model in a Hugging Face folder: safetensors in one file, or in shards with an index.

    `dtype` is that of the parameters; "auto" is the checkpoint's own. `shardings` is one for all, or a tree
    of the parameters' structure (`model.sharding`); by default everything lies on the default device. `place`
    puts one array where its sharding says; the numpy array that it gets is its to keep, and on a CPU becomes
    the parameter itself. `quantization` is one of `model.weights.compress.FORMS`: by default codes are
    kept as they are stored, where records can hold them in less memory. `track` wraps the parts while they
    are read. Raises CheckpointError for what is missing, surplus, misshapen, cut off or not finite.
    """
    found = find(Path(path), dtype)
    where, plan = placement(shardings), plan_for(quantization)

    def put(array: Any, own: Any) -> Any:
        return jax.block_until_ready(place(array, fitted(own, array.shape)))

    def placed(group: ParameterGroup) -> dict[str, Any]:
        kept = keep(group, found.tensors, found.dtype, quantization)
        arrays = kept.read() if kept else read_group(group, found.tensors, found.dtype)
        return {name: jax.tree.map(partial(put, own=where(name)), leaf) for name, leaf in arrays.items()}

    leaves: dict[str, Any] = {}
    for group in track(found.in_order):
        leaves |= {name: compressed_at(name, leaf, plan, donate=True) for name, leaf in placed(group).items()}
    return found.config, found.tree(leaves)


def read_specs(path: str | Path, dtype: Any = "auto", quantization: str | None = None) -> Decoder:
    """The structure of what `load` returns, as specs; no weight is read. Raises CheckpointError."""
    raw, config = read_model(Path(path))[1:]
    if raw.get("quantization_config") is None:
        return form_spec(config, quantization)
    found = find(Path(path), dtype)
    plan = plan_for(quantization)
    leaves = {}
    for group in found.wanted:
        kept = keep(group, found.tensors, found.dtype, quantization)
        leaves |= (
            kept.specs() if kept else {p.path: compressed_at(p.path, p.spec, plan) for p in group.parameters}
        )
    return found.tree(leaves)


@dataclass(frozen=True)
class Found:
    """A folder's model before its weights are read: sizes, the tensors by name, the parameters in them, and
    their dtype."""

    config: ModelConfig
    tensors: Mapping[str, TensorSource]
    wanted: list[ParameterGroup]
    dtype: np.dtype

    @property
    def in_order(self) -> list[ParameterGroup]:
        """Parameters in the order of the files."""

        def place(group: ParameterGroup) -> tuple[Path, int]:
            first = self.tensors[group.names[0]]
            return first.file, first.start

        return sorted(self.wanted, key=place)

    def tree(self, leaves: Mapping[str, Any]) -> Decoder:
        specs = decoder_spec(self.config)
        treedef = jax.tree.structure(specs, is_leaf=is_spec)
        return jax.tree.unflatten(treedef, [leaves[path] for path in paths(specs)])


def find(folder: Path, dtype: Any) -> Found:
    """Everything about a folder but its numbers. Raises CheckpointError for what is missing, surplus or
    misshapen."""
    family, raw, config = read_model(folder)
    tensors = sources(raw, find_tensors(folder, family))
    family = family.stored_in(tensors)
    if config.num_layers > len(tensors):  # one is missing; to list those of thousands of layers takes long
        raise CheckpointError(
            f"{folder / 'config.json'}: a model of {config.num_layers} layers, "
            f"but only {len(tensors)} tensors are stored"
        )
    wanted = groups(family, config)
    check(folder, family, config, wanted, tensors)
    return Found(
        config, tensors, wanted, choose_dtype(dtype, raw, tensors[family.names["embed"].name], folder)
    )


def placement(shardings: Any) -> Callable[[str], Any]:
    """The sharding of a parameter by its path, from one for all, a tree of the parameters' structure, or
    None."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return lambda path: shardings
    return paths(shardings).__getitem__


def read_group(
    group: ParameterGroup, tensors: Mapping[str, TensorSource], dtype: np.dtype
) -> dict[str, np.ndarray]:
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

    `dtype` casts; None keeps the parameters' own, which must then be one for all. `like` is a folder or the
    fields of a `config.json` that describe this model, to write a folder of the same family; without it the
    model is written as a Llama, its token ids left to a `generation_config.json`. Raises ValueError where the
    parameters are not those of the configuration, or the fields do not describe it.
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
    """The family to write, with the names of the folder's own tensors, and the fields of its
    `config.json`."""
    if like is None:
        raw = llama.export(config) | {"bos_token_id": None, "eos_token_id": None}
        if FAMILIES["llama"].config(raw) != config:
            raise ValueError(f"a config.json cannot express {config}")
        return FAMILIES["llama"], raw
    raw = dict(like) if isinstance(like, Mapping) else read_config_json(Path(like))
    raw.pop("quantization_config", None)
    family = FAMILIES[model_type(raw)]
    if family.config(raw) != config:
        raise ValueError(f"like describes another model than the configuration {config}")
    if family.also and not isinstance(like, Mapping) and any(Path(like).glob("*.safetensors")):
        family = family.stored_in(find_tensors(Path(like), family))
    return family, raw


def read_config(path: str | Path) -> ModelConfig:
    """The sizes of the model in a folder, from its `config.json` in either style.

    Raises CheckpointError for a missing or wrong field, and for what is not supported, with the field and its
    value.
    """
    return read_model(Path(path))[2]


def read_model(folder: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    raw = read_config_json(folder)
    try:
        check_config(raw)
        family = FAMILIES[model_type(raw)]
        return family, raw, family.config(raw)
    except ValueError as e:
        raise CheckpointError(f"{folder / 'config.json'}: {e}") from e


def model_type(raw: Mapping[str, Any]) -> str:
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    raise ValueError(f"model_type is {shown(kind)}, expected one of {', '.join(FAMILIES)}")


def known_dtype(dtype: Any) -> np.dtype:
    try:
        return DTYPES[str(np.dtype(dtype))]
    except (TypeError, KeyError) as e:
        raise ValueError(f"dtype is {shown(dtype)}, expected 'auto' or one of {', '.join(DTYPES)}") from e


def choose_dtype(dtype: Any, raw: Mapping[str, Any], embed: TensorSource, folder: Path) -> np.dtype:
    """The dtype asked for; for "auto" the one that config.json names, or else that of the stored
    embedding."""
    found = named_dtype(raw, folder) or DTYPES.get(str(embed.dtype))
    if found is None:
        raise unknown_dtype(embed.dtype, folder)
    return found if isinstance(dtype, str) and dtype == "auto" else known_dtype(dtype)


def named_dtype(raw: Mapping[str, Any], folder: Path) -> np.dtype | None:
    """The dtype that config.json names. Raises CheckpointError for an unknown one."""
    named = raw.get("dtype") or raw.get("torch_dtype")
    found = DTYPES.get(str(named).removeprefix("torch."))
    if named and found is None:
        raise unknown_dtype(named, folder)
    return found


def unknown_dtype(named: Any, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder / 'config.json'}: dtype is {shown(named)}, expected one of {', '.join(DTYPES)}"
    )


def stored_dtype(path: str | Path) -> np.dtype:
    """The dtype that "auto" is in `load`; no weight is read. Raises CheckpointError."""
    folder = Path(path)
    return named_dtype(read_model(folder)[1], folder) or find(folder, "auto").dtype


def check(
    folder: Path,
    family: Family,
    config: ModelConfig,
    wanted: list[ParameterGroup],
    tensors: Mapping[str, TensorSource],
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


def check_tensor(found: TensorSource, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise CheckpointError(
            f"{found.file}: tensor {found.name!r} has shape {found.shape}, expected {expected}"
        )
    if found.dtype is None:
        raise CheckpointError(
            f"{found.file}: tensor {found.name!r} has dtype {found.code}, expected one of {', '.join(FLOATS)}"
        )


def is_ignored(name: str, family: Family, config: ModelConfig) -> bool:
    """True if a tensor is known to change nothing. A pattern's group `beyond` matches only layers past the
    last, its group `borrows` those that read the keys of others."""
    found = next((m for pattern in family.ignored if (m := re.fullmatch(pattern, name))), None)
    if found is None:
        return False
    beyond, borrows = (found.groupdict().get(group) for group in ("beyond", "borrows"))
    if borrows is not None:
        mixers = [kind.mixer for kind in config.layers][int(borrows) :]
        return bool(mixers) and isinstance(mixers[0], GroupedQuery) and mixers[0].borrows > 0
    return beyond is None or int(beyond) >= config.num_layers


def check_surplus(
    tensor: TensorSource, name: str, family: Family, tensors: Mapping[str, TensorSource]
) -> None:
    """A tied model may store its output matrix beside its embedding, if the two are equal."""
    if name != family.names["head"].name:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} is not a parameter of this model")
    if not same_numbers(tensor, tensors[family.names["embed"].name]):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is not the embedding, "
            "which tie_word_embeddings says it is"
        )


def check_leaves(expected: dict[str, tuple[int, ...]], leaves: dict[str, Any]) -> None:
    found = {path: leaf.shape for path, leaf in leaves.items()}
    for path in expected | found:
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"parameter {path} has shape {found.get(path)}, the configuration says {expected.get(path)}"
            )


def one_dtype(leaves: dict[str, Any], own: Mapping[str, np.dtype]) -> np.dtype:
    """The dtype of all parameters, without those that have their own. Raises ValueError if they differ."""
    dtypes = {np.dtype(leaf.dtype) for path, leaf in leaves.items() if path not in own}
    if len(dtypes) > 1:
        raise ValueError(
            f"the parameters have dtypes {', '.join(sorted(map(str, dtypes)))}: say which to write"
        )
    return dtypes.pop()
