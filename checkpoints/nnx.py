"""Parameters trained elsewhere: a Flax NNX state, or any mapping of arrays, with duetto's names."""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from ..model.config import ModelConfig
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, leaves_by_path, paths_and_leaves


def params_from_state(config: ModelConfig, state: Any, names: Mapping[str, str] | None = None) -> Decoder:
    """Return a decoder's parameters from arrays by path. The arrays are used without a copy.

    state: an `nnx.State` or a nested mapping. Its dotted paths are ours (`layers.0.attention.q`, as in
    `model.tree.leaves_by_path(decoder_spec(config))`), unless `names` translates them.
    names: their path to ours; `{}` is a number, as in `{"blocks.{}.wq": "layers.{}.attention.q"}`.

    Raises ValueError, with the path, for a parameter that is missing, unknown, given twice or misshapen.
    """
    entries = [(translate_path(path, names or {}), path, leaf) for path, leaf in flatten_state(state)]
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
