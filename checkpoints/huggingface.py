"""Hugging Face folders, read and written: `config.json` and safetensors weights.

A folder with anything unknown is refused. The error is one sentence that names the file and the field
or tensor. Pickled weights are never read. Loading streams: beside the model itself the host holds a few
megabytes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.config import GroupedQuery, ModelConfig
from ..model.sharding import fit_sharding, place_on_devices
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, leaves_by_path
from ..model.weights.compression.compress import compress_at_path, form_spec, weight_form_plan
from ..refusals import quote
from .configuration.nearest_family import unknown_family_error
from .families import FAMILIES, llama
from .families.family import BUFFER_PATTERNS, Family
from .folders import read_config_json
from .layout import ParameterGroup, parameter_groups
from .quantised.codes import select_quantised_group
from .quantised.config import check_quantization, tensor_sources
from .tensors import (
    FLOATS,
    CheckpointError,
    TensorSource,
    empty_aligned,
    has_zeros_only,
    read_into_views,
    same_numbers,
    write_tensors,
)
from .weight_files import list_text_tensors

HEAD_PATHS = ("head", "head_bias")
DTYPES = {str(dtype): dtype for dtype in FLOATS.values()}


def load_hf(
    path: str | Path,
    dtype: Any = "auto",
    shardings: Any = None,
    place: Callable[[np.ndarray, Any], Any] = place_on_devices,
    quantization: str | None = None,
    track: Callable[[list[ParameterGroup]], Iterable[ParameterGroup]] = iter,
) -> tuple[ModelConfig, Decoder]:
    """Read the model in a Hugging Face folder: safetensors in one file, or in shards with an index.

    dtype: of the parameters; "auto" is the checkpoint's own.
    shardings: one for all parameters, or a tree like theirs (`model.sharding`); None is the default device.
    place: moves one numpy array to its sharding. It may keep the array, which on a CPU becomes the
        parameter.
    quantization: one of `WEIGHT_FORMS` of `model.weights.compression.compress`. None keeps stored codes if
        records hold them in less memory.
    track: wraps the parameter groups while they are read, for progress.

    Raises CheckpointError for tensors that are missing, surplus, misshapen, cut off or not finite.
    """
    checkpoint = index_checkpoint(Path(path), dtype)
    sharding_at, plan = sharding_lookup(shardings), weight_form_plan(quantization)

    def put_array(array: Any, sharding: Any) -> Any:
        return jax.block_until_ready(place(array, fit_sharding(sharding, array.shape)))

    def place_group(group: ParameterGroup) -> dict[str, Any]:
        """Read one group, and return its parameters on their devices, by path."""
        quantised = select_quantised_group(group, checkpoint.tensors, checkpoint.dtype, quantization)
        arrays = (
            quantised.read_records() if quantised else read_group(group, checkpoint.tensors, checkpoint.dtype)
        )
        return {
            name: jax.tree.map(partial(put_array, sharding=sharding_at(name)), leaf)
            for name, leaf in arrays.items()
        }

    leaves: dict[str, Any] = {}
    for group in track(checkpoint.groups_by_offset):
        leaves |= {
            name: compress_at_path(name, leaf, plan, donate=True) for name, leaf in place_group(group).items()
        }
    return checkpoint.config, checkpoint.build_tree(leaves)


def read_hf_specs(path: str | Path, dtype: Any = "auto", quantization: str | None = None) -> Decoder:
    """Return the specs of the parameters that `load_hf` returns, without reading weights. Raises
    CheckpointError."""
    raw, config = read_family_config(Path(path))[1:]
    if raw.get("quantization_config") is None:
        return form_spec(config, quantization)
    checkpoint = index_checkpoint(Path(path), dtype)
    plan = weight_form_plan(quantization)
    leaves = {}
    for group in checkpoint.groups:
        quantised = select_quantised_group(group, checkpoint.tensors, checkpoint.dtype, quantization)
        leaves |= (
            quantised.record_specs()
            if quantised
            else {p.path: compress_at_path(p.path, p.spec, plan) for p in group.parameters}
        )
    return checkpoint.build_tree(leaves)


@dataclass(frozen=True)
class CheckpointIndex:
    """Model in a folder, whose weights are not read yet.

    config: sizes of the model.
    tensors: stored tensors by name.
    groups: parameters, grouped by the tensors that store them.
    dtype: dtype of the parameters.
    """

    config: ModelConfig
    tensors: Mapping[str, TensorSource]
    groups: list[ParameterGroup]
    dtype: np.dtype

    @property
    def groups_by_offset(self) -> list[ParameterGroup]:
        """Return the groups in the order of their tensors in the files, so that reads are sequential."""

        def file_offset(group: ParameterGroup) -> tuple[Path, int]:
            first = self.tensors[group.names[0]]
            return first.file, first.start

        return sorted(self.groups, key=file_offset)

    def build_tree(self, leaves: Mapping[str, Any]) -> Decoder:
        """Return the decoder with these leaves, by path."""
        specs = decoder_spec(self.config)
        treedef = jax.tree.structure(specs, is_leaf=is_spec)
        return jax.tree.unflatten(treedef, [leaves[path] for path in leaves_by_path(specs)])


def index_checkpoint(folder: Path, dtype: Any) -> CheckpointIndex:
    """Read everything about a folder except its weights. A folder without a head gives a model without one.

    Raises CheckpointError for tensors that are missing, surplus or misshapen.
    """
    family, raw, config = read_family_config(folder)
    tensors = tensor_sources(raw, list_text_tensors(folder, family))
    family = family.with_matching_names(tensors)
    config = replace(config, has_head=has_stored_head(family, config, tensors))
    if config.num_layers > len(tensors):  # listing the parameters of thousands of layers takes long
        raise CheckpointError(
            f"{folder / 'config.json'}: a model of {config.num_layers} layers, "
            f"but only {len(tensors)} tensors are stored"
        )
    groups = parameter_groups(family.names, config)
    check_stored_tensors(folder, family, config, groups, tensors)
    return CheckpointIndex(
        config, tensors, groups, choose_dtype(dtype, raw, tensors[family.names["embed"].name], folder)
    )


def has_stored_head(family: Family, config: ModelConfig, tensors: Collection[str]) -> bool:
    """Return False if the head is not tied and no tensor stores its parameters."""
    head_names = {
        family.names[path].name for path in HEAD_PATHS if path in leaves_by_path(decoder_spec(config))
    }
    return not head_names or any(name in tensors for name in head_names)


def sharding_lookup(shardings: Any) -> Callable[[str], Any]:
    """Return a function from a parameter's path to its sharding; `shardings` is one for all, a tree, or
    None."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return lambda path: shardings
    return leaves_by_path(shardings).__getitem__


def read_group(
    group: ParameterGroup, tensors: Mapping[str, TensorSource], dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Read the parameters that are stored together; returns arrays by path."""
    arrays = [empty_aligned(p.spec.shape, np.dtype(p.spec.dtype or dtype)) for p in group.parameters]
    for i, name in enumerate(group.names):
        read_into_views(tensors[name], group.tensor_views(arrays, i))
    return {p.path: array for p, array in zip(group.parameters, arrays, strict=True)}


def save_hf(
    path: str | Path,
    config: ModelConfig,
    params: Decoder,
    dtype: Any = None,
    like: str | Path | Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `load_hf` and Transformers read: `config.json` and `model.safetensors`.

    dtype: casts all parameters; None keeps their own dtype, which must be one for all.
    like: folder, or fields of a `config.json`, of this model: the same family is written. None writes a
    Llama, whose token ids are left to a `generation_config.json`.

    Raises ValueError if the parameters do not fit the configuration, or the fields do not describe it.
    """
    folder = Path(path)
    family, raw = choose_family(config, like)
    leaves, groups = leaves_by_path(params), parameter_groups(family.names, config)
    check_leaf_shapes({p.path: p.spec.shape for group in groups for p in group.parameters}, leaves)
    fixed_dtypes = {
        p.path: np.dtype(p.spec.dtype) for group in groups for p in group.parameters if p.spec.dtype
    }
    chosen = known_dtype(common_dtype(leaves, fixed_dtypes) if dtype is None else dtype)
    raw |= {"dtype" if "dtype" in raw else "torch_dtype": str(chosen)}
    tensors = [(group, i, name) for group in groups for i, name in enumerate(group.names)]
    shapes = {
        name: (group.shape, fixed_dtypes.get(group.parameters[0].path, chosen)) for group, _, name in tensors
    }
    folder.mkdir(parents=True, exist_ok=True)
    arrays = (g.tensor_views([np.asarray(leaves[p.path]) for p in g.parameters], i) for g, i, _ in tensors)
    write_tensors(folder / "model.safetensors", shapes, arrays)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def choose_family(
    config: ModelConfig, like: str | Path | Mapping[str, Any] | None
) -> tuple[Family, dict[str, Any]]:
    """Return the family to write, with the tensor names of the folder `like`, and the fields of its
    `config.json`.

    Raises ValueError if the fields describe another model than `config`.
    """
    full_config = replace(config, has_head=True)  # fields describe a model with a head
    if like is None:
        raw = llama.export_config(config) | {"bos_token_id": None, "eos_token_id": None}
        if FAMILIES["llama"].parse_config(raw) != full_config:
            raise ValueError(f"a config.json cannot express {config}")
        return FAMILIES["llama"], raw
    raw = dict(like) if isinstance(like, Mapping) else read_config_json(Path(like))
    raw.pop("quantization_config", None)
    family = FAMILIES[model_type(raw)]
    if family.parse_config(raw) != full_config:
        raise ValueError(f"like describes another model than the configuration {config}")
    if family.alternative_names and not isinstance(like, Mapping) and any(Path(like).glob("*.safetensors")):
        family = family.with_matching_names(list_text_tensors(Path(like), family))
    return family, raw


def read_config(path: str | Path) -> ModelConfig:
    """Read the sizes of the model in a folder from its `config.json`, in either style.

    Raises CheckpointError, with the field and its value, for a missing, wrong or unsupported field.
    """
    return read_family_config(Path(path))[2]


def read_family_config(folder: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    """Return a folder's family, the fields of its `config.json`, and the model's sizes. Raises
    CheckpointError."""
    raw = read_config_json(folder)
    try:
        check_quantization(raw)
        family = FAMILIES[model_type(raw)]
        return family, raw, family.parse_config(raw)
    except ValueError as e:
        raise CheckpointError(f"{folder / 'config.json'}: {e}") from e


def model_type(raw: Mapping[str, Any]) -> str:
    """Return the `model_type` of a `config.json`. Raises ValueError for a family that is not supported.

    The error names the family whose fields are nearest.
    """
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind
    raise unknown_family_error(raw)


def known_dtype(dtype: Any) -> np.dtype:
    """Return a dtype that parameters may have. Raises ValueError for any other."""
    try:
        return DTYPES[str(np.dtype(dtype))]
    except (TypeError, KeyError) as e:
        raise ValueError(f"dtype is {quote(dtype)}, expected 'auto' or one of {', '.join(DTYPES)}") from e


def choose_dtype(dtype: Any, raw: Mapping[str, Any], embed_source: TensorSource, folder: Path) -> np.dtype:
    """Return the dtype to load: `dtype`, or for "auto" the one in config.json, else the stored
    embedding's."""
    stated = config_dtype(raw, folder) or DTYPES.get(str(embed_source.dtype))
    if stated is None:
        raise unknown_dtype_error(embed_source.dtype, folder)
    return stated if isinstance(dtype, str) and dtype == "auto" else known_dtype(dtype)


def config_dtype(raw: Mapping[str, Any], folder: Path) -> np.dtype | None:
    """Return the dtype that config.json names, or None. Raises CheckpointError for an unknown one."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if name and dtype is None:
        raise unknown_dtype_error(name, folder)
    return dtype


def unknown_dtype_error(name: Any, folder: Path) -> CheckpointError:
    """Return the error for a dtype of a folder that is not supported."""
    return CheckpointError(
        f"{folder / 'config.json'}: dtype is {quote(name)}, expected one of {', '.join(DTYPES)}"
    )


def read_hf_dtype(path: str | Path) -> np.dtype:
    """Return the dtype that `load_hf` chooses for "auto", without reading weights. Raises CheckpointError."""
    folder = Path(path)
    return config_dtype(read_family_config(folder)[1], folder) or index_checkpoint(folder, "auto").dtype


def check_stored_tensors(
    folder: Path,
    family: Family,
    config: ModelConfig,
    groups: list[ParameterGroup],
    tensors: Mapping[str, TensorSource],
) -> None:
    """Raise CheckpointError unless each parameter is stored in its shape, and other tensors change
    nothing."""
    for group in groups:
        expected = group.shape
        for name in group.names:
            if name not in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is missing, expected one of shape {expected}"
                )
            check_tensor(tensors[name], expected)
    for name in sorted(set(tensors) - {name for group in groups for name in group.names}):
        if not is_ignored(name, family, config):
            check_surplus(tensors[name], name, family, tensors)


def check_tensor(source: TensorSource, expected: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has the expected shape and holds floats."""
    if source.shape != expected:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} has shape {source.shape}, expected {expected}"
        )
    if source.dtype is None:
        raise CheckpointError(
            f"{source.file}: tensor {source.name!r} has dtype {source.code}, "
            f"expected one of {', '.join(FLOATS)}"
        )


def is_ignored(name: str, family: Family, config: ModelConfig) -> bool:
    """Return True if a tensor is known to change nothing.

    A pattern's group `beyond` is the number of a layer, and matches only after the last layer. Its group
    `borrows` matches only layers that read the keys of others.
    """
    patterns = BUFFER_PATTERNS + family.ignored_patterns
    match = next((m for pattern in patterns if (m := re.fullmatch(pattern, name))), None)
    if match is None:
        return False
    beyond, borrows = (match.groupdict().get(group) for group in ("beyond", "borrows"))
    if borrows is not None:
        mixers = [kind.mixer for kind in config.layers][int(borrows) :]
        return bool(mixers) and isinstance(mixers[0], GroupedQuery) and mixers[0].kv_layers_back > 0
    return beyond is None or int(beyond) >= config.num_layers


def check_surplus(
    tensor: TensorSource, name: str, family: Family, tensors: Mapping[str, TensorSource]
) -> None:
    """Raise CheckpointError for a tensor that is no parameter, unless its numbers change nothing.

    A bias of zeros changes nothing, nor does a tied model's output matrix that equals its embedding.
    """
    if name == family.names["head"].name:
        if not same_numbers(tensor, tensors[family.names["embed"].name]):
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name!r} is not the embedding, which tie_word_embeddings says "
                'it is: with {"tie_word_embeddings": false} in config.json or hf_overrides it is the head'
            )
        return
    if not name.endswith(".bias") or not has_zeros_only(tensor):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r} is not a parameter of this model")


def check_leaf_shapes(expected: dict[str, tuple[int, ...]], leaves: dict[str, Any]) -> None:
    """Raise ValueError unless parameters have the expected paths and shapes."""
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    for path in expected | shapes:
        if expected.get(path) != shapes.get(path):
            raise ValueError(
                f"parameter {path} has shape {shapes.get(path)}, the configuration says {expected.get(path)}"
            )


def common_dtype(leaves: dict[str, Any], fixed_dtypes: Mapping[str, np.dtype]) -> np.dtype:
    """Return the dtype of all parameters but those in `fixed_dtypes`. Raises ValueError if they
    differ."""
    dtypes = {np.dtype(leaf.dtype) for path, leaf in leaves.items() if path not in fixed_dtypes}
    if len(dtypes) > 1:
        raise ValueError(
            f"the parameters have dtypes {', '.join(sorted(map(str, dtypes)))}: say which to write"
        )
    return dtypes.pop()


# Former names, until 0.3: docs/releasing.md
load, save = load_hf, save_hf
