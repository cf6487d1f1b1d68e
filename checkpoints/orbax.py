"""Our own folders: the tree of parameters as an Orbax checkpoint, beside the files that describe the model.

`params/` is an ordinary Orbax checkpoint of nested dictionaries (`layers`, `0`, `attention`, `q`): other
programs can read it. `duetto.json` is written last and lists every file, so that a folder which was cut short
or lost a file is refused. Restoring places each parameter as it is read, in its dtype and on its devices, and
holds about twice the largest one beside them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..model.config import ModelConfig
from ..model.sharding import fitted
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import Spec, is_spec, not_finite, paths
from ..model.weights.lowrank import LowRank
from ..model.weights.quant import Quantised
from ..refusals import shown
from .folders import files, read_json
from .huggingface import known_dtype, placement, read_config
from .tensors import CheckpointError

MANIFEST, PARAMS, FORMAT = "duetto.json", "params", 1
# bytes of a parameter that are read at once, so that a device reads little beside its own part
CHUNK = 32 << 20
READING = 64 << 20  # bytes on their way from the disk to devices; more where one parameter needs more
RECORDS = {"Quantised": Quantised, "LowRank": LowRank}


def is_orbax(path: str | Path) -> bool:
    """True if a folder has the marks of our Orbax checkpoints, complete or not."""
    return (Path(path) / MANIFEST).is_file() or (Path(path) / PARAMS).is_dir()


def save(path: str | Path, params: Any) -> None:
    """Write parameters into a folder that already holds what describes the model (see
    `folders.copy_description`).

    They are written in their own dtypes, quantised ones as they are. The folder is to be a fresh one (see
    `folders.fresh`).
    """
    from orbax.checkpoint import v1 as ocp

    folder, context = Path(path), ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.scoped_storage_options_creator = storage
    with context:
        ocp.save(str(folder.absolute() / PARAMS), nested(paths(params)))
    sizes = {name: (folder / name).stat().st_size for name in files(folder)}
    manifest = {"format": FORMAT, "records": records_of(params), "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def storage(key: Any, value: Any) -> Any:
    """Storage of one parameter: in chunks, if its longest axis has factors to cut it by.

    Orbax cuts by divisors, down to chunks of one row where an axis has no others, and reading those takes
    minutes.
    """
    from orbax.checkpoint import v1 as ocp

    divisible = max(value.shape, default=1) % 16 == 0
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=CHUNK if divisible else None)


def load(path: str | Path, dtype: Any = "auto", shardings: Any = None) -> tuple[ModelConfig, Decoder]:
    """The model in a folder that `save` has written.

    `dtype` is that of the parameters; "auto" is the checkpoint's own, and quantised ones always keep it.
    `shardings` is one for all, or a tree of the parameters' structure (`model.sharding`); by default
    everything lies on the default device. Raises CheckpointError, naming the file or the parameter, for what
    is missing, cut off, of another shape or not finite.
    """
    from orbax.checkpoint import v1 as ocp

    folder = Path(path)
    manifest, config = read_manifest(folder), read_config(folder)
    at = folder.absolute() / PARAMS
    stored = read_metadata(at)
    wanted = structure(folder, config, manifest.records, stored)
    check(at, paths(wanted), stored)
    targets = abstract(paths(wanted), stored, manifest.records, dtype, shardings)
    context = ocp.Context()
    largest = max(x.size * np.dtype(x.dtype).itemsize for x in targets.values())
    context.memory.read_concurrent_bytes = max(READING, 2 * largest)
    with context:
        try:
            found = paths(ocp.load(str(at), nested(targets)))
        except Exception as e:
            raise unreadable(at, e) from e
    if (bad := not_finite(found)) is not None:
        raise CheckpointError(
            f"{at}: parameter {bad} holds NaN or infinity as {found[bad].dtype}, expected finite numbers"
        )
    treedef = jax.tree.structure(wanted, is_leaf=is_spec)
    return config, jax.tree.unflatten(treedef, [found[path] for path in targets])


def stored_dtype(path: str | Path) -> np.dtype:
    """The dtype of what is stored and not quantised; no parameter is read. Raises CheckpointError."""
    folder = Path(path)
    read_manifest(folder)
    return np.dtype(read_metadata(folder.absolute() / PARAMS)["norm.gain"].dtype)


def read_metadata(at: Path) -> dict[str, Any]:
    """Shapes and dtypes of what is stored, by path."""
    from orbax.checkpoint import v1 as ocp

    try:
        metadata = ocp.metadata(str(at)).metadata
    except Exception as e:  # Orbax and tensorstore raise many kinds
        raise unreadable(at, e) from e
    if metadata is None:
        raise unreadable(at, ValueError("its metadata is damaged"))
    return paths(metadata)


def read_specs(path: str | Path) -> Decoder:
    """The structure of what `load` returns, as specs; no parameter is read. Raises CheckpointError."""
    folder = Path(path)
    stored = read_metadata(folder.absolute() / PARAMS)
    wanted = structure(folder, read_config(folder), read_manifest(folder).records, stored)
    check(folder.absolute() / PARAMS, paths(wanted), stored)
    return wanted


@dataclass(frozen=True)
class Manifest:
    """Contents of `duetto.json`: sizes of files in bytes, and which parameters are records of several
    arrays."""

    files: Mapping[str, int]
    records: Mapping[str, Mapping[str, Any]]


def read_manifest(folder: Path) -> Manifest:
    """The manifest, all of whose files are there and, those that hold parameters, in their size."""
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing, so the checkpoint was never finished")
    raw = read_json(file)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{file}: format is {shown(raw.get('format'))}, expected {FORMAT}")
    listed, records = raw.get("files"), raw.get("records")
    if not isinstance(listed, dict) or not isinstance(records, dict):
        raise CheckpointError(f"{file}: files or records is no object")
    for path, stated in records.items():
        if not is_stated(stated):
            raise CheckpointError(
                f"{file}: records: {path} is {shown(stated)}, expected a type of {', '.join(RECORDS)} "
                "and its fields"
            )
    for name, size in listed.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: file {name!r} is missing")
        found = (folder / name).stat().st_size
        if name.startswith(PARAMS) and found != size:
            raise CheckpointError(f"{folder}: file {name!r} has {found} bytes, expected {size}")
    return Manifest(listed, records)


def is_stated(record: Any) -> bool:
    kind = RECORDS.get(str(record.get("type"))) if isinstance(record, dict) else None
    if kind is None:
        return False
    plain = {f.name: type(f.default) for f in fields(kind) if type(f.default) in (int, str)}
    return {name: type(value) for name, value in record.items() if name != "type"} == plain


def unreadable(at: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or repr(error)).splitlines()[0][:200]
    return CheckpointError(f"{at}: Orbax cannot read it ({reason})")


# ---------------------------------------------------------------- trees


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted path as dictionaries within dictionaries."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree


def is_record(x: Any) -> bool:
    return isinstance(x, tuple(RECORDS.values()))


def records_of(params: Any) -> dict[str, dict[str, Any]]:
    """Which leaves are records of several arrays: their type, and what they hold beside arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_record)
    names = {jax.tree_util.keystr(at, simple=True, separator="."): x for at, x in leaves if is_record(x)}
    return {
        path: {"type": type(x).__name__}
        | {f.name: v for f in fields(x) if type(v := getattr(x, f.name)) in (int, str)}
        for path, x in names.items()
    }


def structure(
    folder: Path, config: ModelConfig, records: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Any]
) -> Decoder:
    """The tree that is stored, of specs: a decoder's, with a record's arrays where a parameter is one.

    Raises CheckpointError for a record that is none of the decoder's parameters.
    """

    def record(path: str, stated: Mapping[str, Any]) -> Any:
        kind = RECORDS[stated["type"]]
        arrays = {f.name: stored.get(f"{path}.{f.name}") for f in fields(kind) if f.name not in stated}
        specs = {
            name: found and Spec(found.shape, ("",) * len(found.shape), dtype=found.dtype)
            for name, found in arrays.items()
        }
        return kind(**specs, **{name: value for name, value in stated.items() if name != "type"})

    specs = decoder_spec(config)
    for path in sorted(set(records) - set(paths(specs))):
        raise CheckpointError(
            f"{folder / MANIFEST}: records: {path} is no parameter of the model that config.json describes"
        )
    leaves = [record(p, records[p]) if p in records else s for p, s in paths(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def check(at: Path, wanted: Mapping[str, Spec], stored: Mapping[str, Any]) -> None:
    for path in {**wanted, **stored}:
        found = tuple(stored[path].shape) if path in stored else None
        expected = wanted[path].shape if path in wanted else None
        if found != expected:
            raise CheckpointError(f"{at}: parameter {path} has shape {found}, config.json says {expected}")


def abstract(
    wanted: Mapping[str, Spec],
    stored: Mapping[str, Any],
    records: Mapping[str, Any],
    dtype: Any,
    shardings: Any,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Each parameter as it is to be restored, by path; a record's arrays lie as the parameter would."""
    chosen = None if isinstance(dtype, str) and dtype == "auto" else known_dtype(dtype)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = placement(default if shardings is None else shardings)

    def target(path: str, spec: Spec) -> jax.ShapeDtypeStruct:
        own = spec.dtype or (stored[path].dtype if chosen is None else chosen)
        record = path.rpartition(".")[0]
        lies = fitted(where(record), spec.shape) if record in records else where(path)
        return jax.ShapeDtypeStruct(spec.shape, own, sharding=lies)

    return {path: target(path, spec) for path, spec in wanted.items()}
