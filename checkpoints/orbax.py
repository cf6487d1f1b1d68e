"""duetto's own folders: the tree of parameters as an Orbax checkpoint, beside the files that describe the
model.

`params/` is an ordinary Orbax checkpoint of nested dictionaries (`layers`, `0`, `attention`, `q`), which
other programs can read. `duetto.json` is written last and lists every file: a folder that was cut short or
lost a file is refused. Each parameter is restored in its dtype on its devices. The host holds about twice the
largest parameter meanwhile.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.config import ModelConfig
from ..model.sharding import fit_sharding
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import Spec, find_non_finite, is_spec, leaves_by_path, paths_and_leaves
from ..model.weights.compression.lowrank import LowRank
from ..model.weights.quant import LOST_CODES, Quantised, find_lost_codes
from ..model.weights.schemes import SCHEMES
from ..refusals import quote
from .folders import list_files, read_json
from .huggingface import HEAD_PATHS, known_dtype, read_config, sharding_lookup
from .tensors import CheckpointError

MANIFEST, PARAMS_FOLDER, FORMAT_VERSION = "duetto.json", "params", 1
# bytes of a stored chunk: a device reads whole chunks, so small ones waste little outside of its part
CHUNK_BYTES = 32 << 20
READ_BYTES = 64 << 20  # bytes in flight from disk to devices; more if one parameter needs more
RECORD_TYPES = {"Quantised": Quantised, "LowRank": LowRank}


def is_orbax(path: str | Path) -> bool:
    """Return True if a folder holds our Orbax checkpoint, complete or not."""
    return (Path(path) / MANIFEST).is_file() or (Path(path) / PARAMS_FOLDER).is_dir()


def save_orbax(path: str | Path, params: Any) -> None:
    """Write parameters into a folder that already has the files of `folders.copy_description`.

    Dtypes are kept, and quantised parameters are written as they are. The folder should be one of
    `folders.atomic_folder`.
    """
    from orbax.checkpoint import v1 as ocp

    folder, context = Path(path), ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.scoped_storage_options_creator = storage_options
    with context:
        ocp.save(str(folder.absolute() / PARAMS_FOLDER), nest_leaves(leaves_by_path(params)))
    sizes = {name: (folder / name).stat().st_size for name in list_files(folder)}
    manifest = {"format": FORMAT_VERSION, "records": describe_records(params), "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def storage_options(key: Any, value: Any) -> Any:
    """Return Orbax's storage options of one parameter: chunks of CHUNK_BYTES, if an axis has factors to cut
    it by.

    Orbax cuts an axis by its divisors. Without small ones a chunk is a single row, and reading takes minutes.
    """
    from orbax.checkpoint import v1 as ocp

    divisible = max(value.shape, default=1) % 16 == 0
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=CHUNK_BYTES if divisible else None)


def load_orbax(path: str | Path, dtype: Any = "auto", shardings: Any = None) -> tuple[ModelConfig, Decoder]:
    """Read the model in a folder that `save_orbax` has written.

    dtype: of the parameters; "auto" is the checkpoint's own. Quantised parameters keep theirs.
    shardings: one for all parameters, or a tree like theirs (`model.sharding`); None is the default device.

    Raises CheckpointError, with the file or parameter, for data that is missing, cut off, misshapen or not
    finite.
    """
    from orbax.checkpoint import v1 as ocp

    folder = Path(path)
    manifest, store = read_manifest(folder), folder.absolute() / PARAMS_FOLDER
    stored = read_orbax_metadata(store)
    config = read_stored_config(folder, stored)
    specs = build_spec_tree(folder, config, manifest.records, stored)
    check_stored_shapes(store, leaves_by_path(specs), stored)
    targets = restoration_targets(leaves_by_path(specs), stored, manifest.records, dtype, shardings)
    context = ocp.Context()
    largest = max(x.size * np.dtype(x.dtype).itemsize for x in targets.values())
    context.memory.read_concurrent_bytes = max(READ_BYTES, 2 * largest)
    with context:
        try:
            leaves = leaves_by_path(ocp.load(str(store), nest_leaves(targets)))
        except Exception as e:
            raise unreadable_error(store, e) from e
    if (bad := find_non_finite(leaves)) is not None:
        raise CheckpointError(
            f"{store}: parameter {bad} holds NaN or infinity as {leaves[bad].dtype}, expected finite numbers"
        )
    treedef = jax.tree.structure(specs, is_leaf=is_spec)
    params = jax.tree.unflatten(treedef, [leaves[path] for path in targets])
    if (lost := find_lost_codes(params)) is not None:
        raise CheckpointError(f"{store}: parameter {lost} {LOST_CODES}")
    return config, params


def read_orbax_dtype(path: str | Path) -> np.dtype:
    """Return the dtype of the parameters that are not quantised, without reading any. Raises
    CheckpointError."""
    folder = Path(path)
    records = read_manifest(folder).records
    stored = read_orbax_metadata(folder.absolute() / PARAMS_FOLDER)
    plain = [path for path in stored if not any(path.startswith(f"{record}.") for record in records)]
    path = next(path for path in ("norm.gain", *plain, *stored) if path in stored)
    return np.dtype(stored[path].dtype)


def read_orbax_metadata(store: Path) -> dict[str, Any]:
    """Return Orbax's metadata (shape, dtype) of the stored arrays, by path. Raises CheckpointError."""
    from orbax.checkpoint import v1 as ocp

    try:
        metadata = ocp.metadata(str(store)).metadata
    except Exception as e:  # Orbax and tensorstore raise many kinds
        raise unreadable_error(store, e) from e
    if metadata is None:
        raise unreadable_error(store, ValueError("its metadata is damaged"))
    return leaves_by_path(metadata)


def read_stored_config(folder: Path, stored: Mapping[str, Any]) -> ModelConfig:
    """Return the sizes of the model in a folder, without a head if none is stored."""
    config = read_config(folder)
    head_paths = set(HEAD_PATHS) & leaves_by_path(decoder_spec(config)).keys()
    has_head = not head_paths or any(path.partition(".")[0] in head_paths for path in stored)
    return replace(config, has_head=has_head)


def read_orbax_specs(path: str | Path) -> Decoder:
    """Return the specs of the parameters that `load_orbax` returns, without reading any. Raises
    CheckpointError."""
    folder = Path(path)
    stored = read_orbax_metadata(folder.absolute() / PARAMS_FOLDER)
    specs = build_spec_tree(folder, read_stored_config(folder, stored), read_manifest(folder).records, stored)
    check_stored_shapes(folder.absolute() / PARAMS_FOLDER, leaves_by_path(specs), stored)
    return specs


@dataclass(frozen=True)
class Manifest:
    """Contents of `duetto.json`.

    files: size of each file in bytes, by its path in the folder.
    records: type and plain fields of each parameter that is a record of several arrays, by path.
    """

    files: Mapping[str, int]
    records: Mapping[str, Mapping[str, Any]]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raises CheckpointError if a file is missing, or a parameter file has
    another size."""
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing, so the checkpoint was never finished")
    raw = read_json(file)
    if raw.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{file}: format is {quote(raw.get('format'))}, expected {FORMAT_VERSION}")
    sizes, records = raw.get("files"), raw.get("records")
    if not isinstance(sizes, dict) or not isinstance(records, dict):
        raise CheckpointError(f"{file}: files or records is no object")
    for path, record in records.items():
        if not is_valid_record(record):
            raise CheckpointError(
                f"{file}: records: {path} is {quote(record)}, expected a type of {', '.join(RECORD_TYPES)} "
                "and its fields"
            )
        if "scheme" in record and record["scheme"] not in SCHEMES:
            raise CheckpointError(
                f"{file}: records: {path} has scheme {quote(record['scheme'])}, expected one of "
                f"{', '.join(SCHEMES)}"
            )
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: file {name!r} is missing")
        actual = (folder / name).stat().st_size
        if name.startswith(PARAMS_FOLDER) and actual != size:
            raise CheckpointError(f"{folder}: file {name!r} has {actual} bytes, expected {size}")
    return Manifest(sizes, records)


def is_valid_record(record: Any) -> bool:
    """Return True if an entry of `records` has a known type, and exactly the plain fields of that type."""
    kind = RECORD_TYPES.get(str(record.get("type"))) if isinstance(record, dict) else None
    if kind is None:
        return False
    plain = {f.name: type(f.default) for f in fields(kind) if type(f.default) in (int, str)}
    return {name: type(value) for name, value in record.items() if name != "type"} == plain


def unreadable_error(store: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that Orbax cannot read."""
    reason = (str(error) or repr(error)).splitlines()[0][:200]
    return CheckpointError(f"{store}: Orbax cannot read it ({reason})")


# ---------------------------------------------------------------- trees


def nest_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return leaves by dotted path as nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def describe_records(params: Any) -> dict[str, dict[str, Any]]:
    """Return the manifest's `records`: type and plain fields of each parameter that is a record, by path."""
    kinds = tuple(RECORD_TYPES.values())
    return {
        path: {"type": type(x).__name__}
        | {f.name: v for f in fields(x) if type(v := getattr(x, f.name)) in (int, str)}
        for path, x in paths_and_leaves(params, kinds)
        if isinstance(x, kinds)
    }


def build_spec_tree(
    folder: Path, config: ModelConfig, records: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Any]
) -> Decoder:
    """Return the decoder's specs as they are stored: a record of specs for each parameter in `records`.

    Raises CheckpointError for a record that is no parameter of the decoder.
    """

    def build_record(path: str, record: Mapping[str, Any]) -> Any:
        kind = RECORD_TYPES[record["type"]]
        arrays = {f.name: stored.get(f"{path}.{f.name}") for f in fields(kind) if f.name not in record}
        specs = {
            name: array and Spec(array.shape, ("",) * len(array.shape), dtype=array.dtype)
            for name, array in arrays.items()
        }
        return kind(**specs, **{name: value for name, value in record.items() if name != "type"})

    specs = decoder_spec(config)
    for path in sorted(set(records) - set(leaves_by_path(specs))):
        raise CheckpointError(
            f"{folder / MANIFEST}: records: {path} is no parameter of the model that config.json describes"
        )
    leaves = [build_record(p, records[p]) if p in records else s for p, s in leaves_by_path(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def check_stored_shapes(store: Path, specs: Mapping[str, Spec], stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the stored arrays have the paths and shapes of `specs`."""
    for path in {**specs, **stored}:
        actual = tuple(stored[path].shape) if path in stored else None
        expected = specs[path].shape if path in specs else None
        if actual != expected:
            raise CheckpointError(
                f"{store}: parameter {path} has shape {actual}, config.json says {expected}"
            )


def restoration_targets(
    specs: Mapping[str, Spec],
    stored: Mapping[str, Any],
    records: Mapping[str, Any],
    dtype: Any,
    shardings: Any,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and sharding in which to restore each array, by path.

    Arrays of a record get the sharding of their parameter.
    """
    chosen = None if isinstance(dtype, str) and dtype == "auto" else known_dtype(dtype)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding_at = sharding_lookup(default if shardings is None else shardings)

    def target_array(path: str, spec: Spec) -> jax.ShapeDtypeStruct:
        leaf_dtype = spec.dtype or (stored[path].dtype if chosen is None else chosen)
        record = path.rpartition(".")[0]
        sharding = fit_sharding(sharding_at(record), spec.shape) if record in records else sharding_at(path)
        return jax.ShapeDtypeStruct(spec.shape, leaf_dtype, sharding=sharding)

    return {path: target_array(path, spec) for path, spec in specs.items()}


# Former names, until 0.3: docs/releasing.md
load, save = load_orbax, save_orbax
