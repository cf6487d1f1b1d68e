"""Layout of parameters in a Hugging Face folder: which share a tensor, and which are split into several."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    def tensor_views(self, arrays: Sequence[np.ndarray], i: int) -> JoinedViews:
        """Return the views of the parameters' arrays that the i-th tensor stores."""
        views = (
            p.stored.view(array[i, ...] if p.stored.is_stacked else array)
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

    names: storage of each parameter, by our path; `{}` is the layer's number.
    """
    leaves = leaves_by_path(decoder_spec(config))
    by_name: dict[str, list[Parameter]] = {}
    for path, spec in leaves.items():
        stored = names[re.sub(r"\b\d+\b", "{}", path)]
        number = re.search(r"\b\d+\b", path)
        name = stored.name.replace("{}", number[0], 1) if number else stored.name
        by_name.setdefault(name, []).append(Parameter(path, spec, stored))
    return [
        ParameterGroup(tuple(members), parameter_tensor_names(name, members[0]))
        for name, members in by_name.items()
    ]


def parameter_tensor_names(name: str, parameter: Parameter) -> tuple[str, ...]:
    """Return the names of the tensors that store a parameter: one for each expert if it is stacked."""
    experts = parameter.spec.shape[0] if parameter.stored.is_stacked else 1
    return tuple(name.format(e) for e in range(experts))
