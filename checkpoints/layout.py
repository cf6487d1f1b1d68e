"""Layout of parameters in a Hugging Face folder: which share a tensor, and which are split into several."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..model.config import ModelConfig
from ..model.transformer import decoder_spec
from ..model.tree import Spec, leaves_by_path
from .families.storage import Stored, stored_shape
from .tensors import JoinedViews


@dataclass(frozen=True)
class Parameter:
    """Parameter of our tree, and its storage.

    path: dotted path in the tree.
    spec: shape and dtype.
    stored: tensor name and axes in the file.
    """

    path: str
    spec: Spec
    stored: Stored


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are stored together: in one tensor, or in one tensor for each expert.

    parameters: in the order in which the tensor joins them.
    names: of the tensors, one for each expert.
    """

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of each stored tensor."""
        return stored_shape([(p.stored, p.spec.shape) for p in self.parameters])

    @property
    def blocks(self) -> dict[str, int]:
        """Return the possible numbers of blocks of a joined axis: digits, and the sizes of the parameters'
        axes by letter."""
        digits = {digit: int(digit) for p in self.parameters for digit in re.findall(r"[2-9]", p.stored.axes)}
        sizes = (zip(p.stored.our_axes, p.spec.shape, strict=True) for p in self.parameters)
        return digits | {letter: size for pairs in sizes for letter, size in pairs}

    def tensor_views(self, arrays: Sequence[np.ndarray], i: int) -> JoinedViews:
        """Return the views of the parameters' arrays that the i-th tensor stores."""
        blocks = self.blocks
        views = (
            p.stored.view(array[i, ...] if p.stored.is_stacked else array, blocks)
            for p, array in zip(self.parameters, arrays, strict=True)
        )
        return JoinedViews(tuple(views), self.parameters[0].stored.is_interleaved)

    def split_arrays(self, arrays: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Split the stored arrays into our parameters, with their paths, by operations of jax.

        An array that lies as its parameter does becomes the parameter without a copy.
        """
        first, start = self.parameters[0].stored, 0
        axis, count = first.join_axis, len(self.parameters)
        for i, p in enumerate(self.parameters):
            end = start + math.prod(p.stored.stored_sizes(p.spec.shape)[axis : axis + 1])
            span = (i, self.shape[axis], count) if first.is_interleaved else (start, end, 1)
            shape = p.spec.shape[p.stored.is_stacked :]
            parts = [p.stored.from_stored(slice_axis(x, axis, *span), shape) for x in arrays]
            yield p.path, jnp.stack(parts) if p.stored.is_stacked else parts[0]
            start = end


def slice_axis(array: Any, axis: int, start: int, end: int, stride: int) -> Any:
    """Return entries of an axis: the array itself if these are all, or if it has no axis."""
    is_whole = array.ndim == 0 or (end - start == array.shape[axis] and stride == 1)
    return array if is_whole else jax.lax.slice_in_dim(array, start, end, stride, axis)


def parameter_groups(names: Mapping[str, Stored], config: ModelConfig) -> list[ParameterGroup]:
    """Return all parameters of a model, grouped by tensor, in the order of the tree's leaves.

    names: storage of each parameter, by our path; `{}` is the layer's number. A tensor joins parameters in
        their order in this table.
    """
    leaves, numbers = leaves_by_path(decoder_spec(config)), stored_layer_numbers(config)
    order = {path: i for i, path in enumerate(names)}
    by_name: dict[str, list[Parameter]] = {}
    for path, spec in leaves.items():
        stored = names[pattern_of(path)]
        number = re.search(r"\b\d+\b", path)
        name = number_layer(stored.name, numbers[int(number[0])]) if number else stored.name
        by_name.setdefault(name, []).append(Parameter(path, spec, stored))
    for members in by_name.values():
        members.sort(key=lambda p: order[pattern_of(p.path)])
    return [
        ParameterGroup(tuple(members), parameter_tensor_names(name, members[0]))
        for name, members in by_name.items()
    ]


def stored_layer_numbers(config: ModelConfig) -> list[dict[str, int]]:
    """Return what stands for each layer in the names of tensors (see Stored), and its number."""
    counts = (1 if kind.ffn is None else 2 for kind in config.layers)
    blocks = accumulate(counts, initial=0)
    return [
        {"{mixer}": block, "{ffn}": block + 1, "{}": i}
        for i, block in zip(range(config.num_layers), blocks, strict=False)
    ]


def number_layer(name: str, numbers: Mapping[str, int]) -> str:
    """Put a layer's number into the name of a tensor that has one. A `{}` after it is an expert's number, and
    stays."""
    mark = next((mark for mark in numbers if mark in name), "{}")
    return name.replace(mark, str(numbers[mark]), 1)


def pattern_of(path: str) -> str:
    """Return a parameter's path with `{}` in place of the layer's number."""
    return re.sub(r"\b\d+\b", "{}", path)


def parameter_tensor_names(name: str, parameter: Parameter) -> tuple[str, ...]:
    """Return the names of the tensors that store a parameter: one for each expert if it is stacked."""
    experts = parameter.spec.shape[0] if parameter.stored.is_stacked else 1
    return tuple(name.format(e) for e in range(experts))
