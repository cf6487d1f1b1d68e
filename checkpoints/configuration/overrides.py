"""Overrides of a folder's `config.json`: `hf_overrides`.

Some settings have several names: an override replaces the one that the folder has. An override without an
effect on the model is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...refusals import ensure, quote
from ..families import FAMILIES
from ..families.fields import Raw
from ..families.ropes import ROPE_FIELDS, find_rope, is_by_layer_type
from ..folders import read_config_json, read_json
from ..huggingface import model_type
from ..quantised.config import check_quantization
from ..tensors import CheckpointError
from .field_log import FieldLog
from .text_models import SHARED_FIELDS, is_nested

# Names of one setting, as paths in config.json.
FIELD_SPELLINGS = (
    ("rope_theta", "rotary_emb_base", "rope_scaling.rope_theta", "rope_parameters.rope_theta",
     "rope_parameters.full_attention.rope_theta"),
    ("rope_local_base_freq", "rope_parameters.sliding_attention.rope_theta"),
    ("partial_rotary_factor", "rotary_pct", "rope_scaling.partial_rotary_factor",
     "rope_parameters.partial_rotary_factor", "rope_parameters.full_attention.partial_rotary_factor"),
    ("max_position_embeddings", "model_max_length", "n_positions", "max_model_len"),
    ("hidden_size", "n_embd"),
    ("intermediate_size", "block_ff_dim"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("norm_topk_prob", "moe_renormalize"),
    ("n_group", "num_expert_group"),
    ("layer_types", "layers_block_type"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
    ("tie_word_embeddings", "tie_embedding"),
    ("dtype", "torch_dtype"),
)  # fmt: skip
QUANTIZATION_FIELD = "quantization_config"  # replaced as a whole: some fields only describe how it was made
EXTRA_FIELDS = ("eos_token_id", "bos_token_id", QUANTIZATION_FIELD)  # fields that are read for every family


@contextmanager
def overridden_folder(folder: Path, changes: Mapping[str, Any] | None) -> Iterator[Path]:
    """Yield the folder, or one of links to its files whose `config.json` has the changes.

    Raises CheckpointError for a folder without `config.json`, and for a change without an effect.
    """
    if not changes:
        yield folder
        return
    raw = apply_overrides(folder, changes)
    with TemporaryDirectory(prefix=f"{folder.name}-overridden-") as links:
        for file in folder.iterdir():
            if file.name != "config.json":
                Path(links, file.name).symlink_to(file.resolve())
        Path(links, "config.json").write_text(json.dumps(raw))
        try:
            yield Path(links)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(links, f"{folder}")) from error


def apply_overrides(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a folder's `config.json` with changes, nested as in the folder.

    Raises CheckpointError for a change without an effect, or whose name is no string.
    """
    raw, outer = read_config_json(folder), read_json(folder / "config.json")
    inner = changes.get("text_config")
    if is_nested(outer) and isinstance(inner, Mapping):
        changes = {name: value for name, value in changes.items() if name != "text_config"} | dict(inner)
    changes = {
        name: normalise_rope_type(value) if name in ROPE_FIELDS else value for name, value in changes.items()
    }
    try:
        check_override_names(changes)
        check_override_effects(raw, changes)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: hf_overrides: {error}") from error
    if not is_nested(outer):
        return merge_fields(raw, changes)
    outer_fields = {name: value for name, value in outer.items() if name not in SHARED_FIELDS}
    return outer_fields | {"text_config": merge_fields(raw, changes)}


# ---------------------------------------------------------------- applying changes


def merge_fields(raw: Raw, changes: Raw) -> dict[str, Any]:
    """Return fields with the changes applied. A change replaces each spelling of its setting that the fields
    have."""
    merged = dict(raw)
    for name in sorted(changes, key=ROPE_FIELDS.__contains__):
        if name in ROPE_FIELDS:
            merged |= rope_replacement(merged, name, changes[name])
            continue
        group = next((group for group in FIELD_SPELLINGS if name in group), ())
        paths = [path for path in group if get_value(merged, path.split(".")) is not None]
        for path in paths or [name]:
            merged = replace_value(merged, path.split("."), changes[name])
    return merged


def rope_replacement(raw: Raw, name: str, rope: Any) -> dict[str, Any]:
    """Return the fields that replace a rope.

    Its base stays unless the new rope states one, as do the ropes of layer types that are not named. A rope
    for all layers also keeps its rotated share of a head.
    """
    old = raw.get("rope_parameters")
    if isinstance(rope, Mapping) and is_by_layer_type(rope):
        old = old if isinstance(old, Mapping) and is_by_layer_type(old) else {}
        bases = {kind: rope_base_fields(old.get(kind)) for kind in rope}
        new = {k: {**bases[k], **(x or {})} if isinstance(x, Mapping | None) else x for k, x in rope.items()}
        cleared = {"rope_scaling": None} if "full_attention" in rope else {}
        return cleared | {"rope_parameters": {**old, **new}}
    if isinstance(old, Mapping) and is_by_layer_type(old):
        return {name: rope}
    stated = find_rope(raw)[1]
    return (
        rope_base_fields(stated, "rope_theta", "partial_rotary_factor")
        | dict.fromkeys(ROPE_FIELDS)
        | {name: rope}
    )


def rope_base_fields(rope: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a rope that hold for any kind, by default its base."""
    stated = rope if isinstance(rope, Mapping) else {}
    return {name: stated[name] for name in names or ("rope_theta",) if stated.get(name) is not None}


def normalise_rope_type(rope: Any) -> Any:
    """Return ropes whose kind has its one name: `rope_type`, in older files `type`."""
    if not isinstance(rope, Mapping):
        return rope
    kind, older = rope.get("rope_type", rope.get("type")), rope.get("type")
    kind_field = {} if kind is None else {"rope_type": kind}
    rest = {
        name: normalise_rope_type(value) for name, value in rope.items() if name != "type" or older != kind
    }
    return rest | kind_field


def get_value(fields: Any, path: Sequence[str]) -> Any:
    """Return the value at a path, or None if the path does not exist."""
    for name in path:
        fields = fields.get(name) if isinstance(fields, Mapping) else None
    return fields


def replace_value(fields: Raw, path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return fields with a value at a path."""
    name, *rest = path
    return {**fields, name: replace_value(fields[name], rest, value) if rest else value}


# ---------------------------------------------------------------- changes without an effect


def check_override_names(changes: Mapping[Any, Any]) -> None:
    """Raise ValueError for a name that is no string, among changes and inside of them."""
    for name, value in changes.items():
        ensure(isinstance(name, str), f"{quote(name)}: {quote(value)} is not allowed: a name is a string")
        if isinstance(value, Mapping):
            check_override_names(value)


def check_override_effects(raw: Raw, changes: Raw) -> None:
    """Raise ValueError for a change without an effect: removing it or altering its value gives the same
    model.

    A change to the value that the fields already have is allowed.
    """
    merged = merge_fields(raw, changes)
    expected = effective_config(merged)
    if isinstance(expected, str):  # these fields are refused when they are read
        return
    for path, value in list_leaves(changes):
        others = [replace_value(changes, path, perturbed) for perturbed in perturb_value(value)]
        if len(path) == 1:
            others.append({name: value for name, value in changes.items() if name != path[0]})
        has_no_effect = all(effective_config(merge_fields(raw, changed)) == expected for changed in others)
        if has_no_effect and not has_value(raw, path, value):
            raise ValueError(
                f"{'.'.join(path)}={quote(value)} changes nothing: {explain_no_effect(path, merged)}"
            )


def has_value(raw: Raw, path: Sequence[str], value: Any) -> bool:
    """Return True if fields have a value at a path already."""
    *parents, name = path
    fields = get_value(raw, parents)
    return isinstance(fields, Mapping) and name in fields and fields[name] == value


def effective_config(raw: Raw) -> Any:
    """Return everything that is read from a `config.json`, or the sentence that refuses it."""
    try:
        check_quantization(raw)
        kind = model_type(raw)
        config = FAMILIES[kind].parse_config(raw)
    except ValueError as error:
        return str(error)
    return kind, config, raw.get("dtype") or raw.get("torch_dtype"), [raw.get(name) for name in EXTRA_FIELDS]


def list_leaves(changes: Raw, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value with its path."""
    for name, value in changes.items():
        path = (*parents, name)
        if isinstance(value, Mapping) and value and name != QUANTIZATION_FIELD:
            yield from list_leaves(value, path)
        else:
            yield path, value


def perturb_value(value: Any) -> list[Any]:
    """Return other values, of the same type if it is a number or a flag."""
    if isinstance(value, bool):
        return [not value]
    return [2 * value + 1, value + 1] if isinstance(value, int | float) else ["?"]


def explain_no_effect(path: Sequence[str], raw: Raw) -> str:
    """Explain why a field has no effect: it is not read, or other fields decide."""
    log = FieldLog(raw, {*EXTRA_FIELDS, "dtype", "torch_dtype"})
    FAMILIES[model_type(raw)].parse_config(log)
    unread = [name for name in path if name not in log.names]
    if not unread:
        return "other fields of config.json decide"
    similar = get_close_matches(unread[0], sorted(log.names), 1, cutoff=0.8)
    return f"{unread[0]} is not read" + (f", did you mean {similar[0]}?" if similar else "")
