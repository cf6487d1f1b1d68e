"""Parameters trained elsewhere, as a Flax NNX state or any mapping of arrays, named as ours are."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ..model.config import ModelConfig
from ..model.transformer import Decoder, decoder_spec
from ..model.tree import is_spec, paths


def params_from_state(config: ModelConfig, state: Any, names: Mapping[str, str] | None = None) -> Decoder:
    """A decoder's parameters from arrays by path; they are used as they are, without a copy.

    `state` is an `nnx.State` or a nested mapping. Its dotted paths are ours (`layers.0.attention.q`, as
    `model.tree.paths` lists them for `decoder_spec(config)`), or are translated by `names`, their path to
    ours, in which `{}` stands for a number: `{"blocks.{}.wq": "layers.{}.attention.q"}`. Raises ValueError
    for a parameter that is missing, unknown, given twice or of another shape, with its path.
    """
    given = [(translated(path, names or {}), path, leaf) for path, leaf in flat(state)]
    for ours, count in Counter(ours for ours, _, _ in given).items():
        if count > 1:
            raise ValueError(f"parameter {ours} is given {count} times")
    found, theirs = {ours: leaf for ours, _, leaf in given}, {ours: path for ours, path, _ in given}
    specs = decoder_spec(config)
    expected = {path: spec.shape for path, spec in paths(specs).items()}
    for path in {**expected, **found}:
        if path not in expected:
            raise ValueError(f"parameter {theirs[path]} is not one of this model: it has no {path}")
        if path not in found:
            raise ValueError(f"parameter {path} is missing, expected shape {expected[path]}")
        if tuple(found[path].shape) != expected[path]:
            shape = tuple(found[path].shape)
            raise ValueError(
                f"parameter {theirs[path]} has shape {shape}, expected {expected[path]} for {path}"
            )
    treedef = jax.tree.structure(specs, is_leaf=is_spec)
    return jax.tree.unflatten(treedef, [found[path] for path in expected])


def flat(state: Any) -> Iterator[tuple[str, Any]]:
    """Arrays of a nested mapping by dotted path; Flax's variables are seen through."""
    nnx = sys.modules.get("flax.nnx")
    tree = nnx.to_pure_dict(state) if nnx and isinstance(state, nnx.State) else state
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)


def translated(path: str, names: Mapping[str, str]) -> str:
    """Our path for one of theirs; theirs, where there is no name for it."""
    numbers = re.findall(r"\b\d+\b", path)
    pattern = re.sub(r"\b\d+\b", "{}", path)
    return names[path] if path in names else names.get(pattern, path).format(*numbers)
