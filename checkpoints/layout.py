"""Layout of parameters in a Hugging Face folder: which share a tensor, and which are split into several."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model.config import ModelConfig
from ..model.transformer import decoder_spec
from ..model.tree import Spec, leaves_by_path
from .families.family import Family
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
            p.stored.view(array[i] if p.stored.is_stacked else array)
            for p, array in zip(self.parameters, arrays, strict=True)
        )
        return JoinedViews(tuple(views), self.parameters[0].stored.is_interleaved)


def parameter_groups(family: Family, config: ModelConfig) -> list[ParameterGroup]:
    """Return all parameters of a model, grouped by tensor, in the order of the tree's leaves."""
    leaves = leaves_by_path(decoder_spec(config))
    by_name: dict[str, list[Parameter]] = {}
    for path, spec in leaves.items():
        stored = family.names[re.sub(r"\b\d+\b", "{}", path)]
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
