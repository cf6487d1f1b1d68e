"""Parameters trained elsewhere: a Flax NNX state, or any mapping of arrays, with duetto's names or a
trainer's."""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import jax

from ..model.config import ModelConfig
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, leaves_by_path, paths_and_leaves
from .families.storage import Stored
from .families.trainers import TRAINERS, Alternatives
from .layout import parameter_groups

Entry = tuple[str, str, Any]  # our path, theirs, and the array


def params_from_state(
    config: ModelConfig, state: Any, names: str | Mapping[str, str | Alternatives] | None = None
) -> Decoder:
    """Return a decoder's parameters from arrays by path. An array that lies as ours does is used without a
    copy.

    state: an `nnx.State` or a nested mapping. Its dotted paths are ours (`layers.0.attention.q`, as in
    `model.tree.leaves_by_path(decoder_spec(config))`), unless `names` translates them.
    names: a trainer of `TRAINERS` ("tunix", "maxtext", "levanter"), or a table. Either from their path to
    ours, `{"blocks.{}.wq": "layers.{}.attention.q"}`, or from ours to a `Stored` of their path and the order
    of its axes, `{"head": Stored("lm_head.w", "D,V->VD")}`; `{}` is a number.

    Raises ValueError, with the path, for a parameter that is missing, unknown, given twice or misshapen, and
    for a trainer without a table.
    """
    if isinstance(names, str) and names not in TRAINERS:
        raise ValueError(f"names is {names!r}, expected a table or one of {', '.join(TRAINERS)}")
    table = TRAINERS[names] if isinstance(names, str) else names or {}
    arrays = flatten_state(state)
    if any(not isinstance(value, str) for value in table.values()):
        entries = read_stored(config, dict(arrays), cast(Mapping[str, Alternatives], table))
    else:
        paths = cast(Mapping[str, str], table)
        entries = [(translate_path(path, paths), path, leaf) for path, leaf in arrays]
    return build_decoder(config, entries)


def build_decoder(config: ModelConfig, entries: list[Entry]) -> Decoder:
    """Return the decoder of these arrays. Raises ValueError for what does not fit."""
    for ours, count in Counter(ours for ours, _, _ in entries).items():
        if count > 1:
            raise ValueError(f"parameter {ours} is given {count} times")
    leaves, theirs = {ours: leaf for ours, _, leaf in entries}, {ours: path for ours, path, _ in entries}
    specs = decoder_spec(config)
    expected = {path: spec.shape for path, spec in leaves_by_path(specs).items()}
    for path in {**expected, **leaves}:
        if path not in expected:
            raise ValueError(f"parameter {theirs[path]} is not one of this model: it has no {path}")
        if path not in leaves:
            raise ValueError(f"parameter {path} is missing, expected shape {expected[path]}")
        if tuple(leaves[path].shape) != expected[path]:
            shape = tuple(leaves[path].shape)
            raise ValueError(
                f"parameter {theirs[path]} has shape {shape}, expected {expected[path]} for {path}"
            )
    treedef = jax.tree.structure(specs, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, [leaves[path] for path in expected])


def read_stored(
    config: ModelConfig, given: Mapping[str, Any], table: Mapping[str, Alternatives]
) -> list[Entry]:
    """Return the arrays as a table of `Stored` says that they lie. Raises ValueError for what does not
    fit."""
    for path in leaves_by_path(decoder_spec(config)):
        if re.sub(r"\b\d+\b", "{}", path) not in table:
            raise ValueError(f"parameter {path} of this model is not in the table of names")
    groups = parameter_groups({ours: choose_stored(stored, given) for ours, stored in table.items()}, config)
    if unknown := sorted(given.keys() - {name for group in groups for name in group.names}):
        raise ValueError(
            f"parameter {unknown[0]} is not one of this model: the table has no such name for it"
        )
    entries: list[Entry] = []
    for group in groups:
        for name in group.names:
            paths = " and ".join(p.path for p in group.parameters)
            if name not in given:
                raise ValueError(f"parameter {name} is missing, expected shape {group.shape} for {paths}")
            if tuple(given[name].shape) != group.shape:
                shape = tuple(given[name].shape)
                raise ValueError(f"parameter {name} has shape {shape}, expected {group.shape} for {paths}")
        arrays = group.split_arrays([given[name] for name in group.names])
        entries += [(path, group.names[0], array) for path, array in arrays]
    return entries


def choose_stored(stored: Alternatives, given: Mapping[str, Any]) -> Stored:
    """Return the first alternative whose array is given for layer 0, or else the first."""
    alternatives = stored if isinstance(stored, tuple) else (stored,)
    return next((s for s in alternatives if s.name.replace("{}", "0") in given), alternatives[0])


def flatten_state(state: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a nested mapping or an NNX state, by dotted path."""
    nnx = sys.modules.get("flax.nnx")
    tree = nnx.to_pure_dict(state) if nnx and isinstance(state, nnx.State) else state
    return paths_and_leaves(tree)


def translate_path(path: str, names: Mapping[str, str]) -> str:
    """Return our path for one of theirs; a path that `names` lacks is returned unchanged."""
    numbers = re.findall(r"\b\d+\b", path)
    pattern = re.sub(r"\b\d+\b", "{}", path)
    return names[path] if path in names else names.get(pattern, path).format(*numbers)
