"""Layout of a model's parameters in a Hugging Face folder: which of them share a tensor, and which are cut
into several."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model.config import ModelConfig
from ..model.transformer import decoder_spec
from ..model.tree import Spec, paths
from .families.family import Family
from .families.stored import Stored, stored_shape
from .tensors import Joined


@dataclass(frozen=True)
class Parameter:
    path: str
    spec: Spec
    stored: Stored


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are stored together: in one tensor, or in one tensor for each expert."""

    parameters: tuple[Parameter, ...]
    names: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each stored tensor."""
        return stored_shape([(p.stored, p.spec.shape) for p in self.parameters])

    def parts(self, arrays: Sequence[np.ndarray], i: int) -> Joined:
        """The part of our parameters' arrays that lies in the i-th tensor."""
        views = (
            p.stored.view(array[i] if p.stored.stacked else array)
            for p, array in zip(self.parameters, arrays, strict=True)
        )
        return Joined(tuple(views), self.parameters[0].stored.in_turns)


def groups(family: Family, config: ModelConfig) -> list[ParameterGroup]:
    """Every parameter that a model of this configuration has, in the order of the tree's leaves."""
    leaves = paths(decoder_spec(config))
    together: dict[str, list[Parameter]] = {}
    for path, spec in leaves.items():
        stored = family.names[re.sub(r"\b\d+\b", "{}", path)]
        number = re.search(r"\b\d+\b", path)
        name = stored.name.replace("{}", number[0], 1) if number else stored.name
        together.setdefault(name, []).append(Parameter(path, spec, stored))
    return [ParameterGroup(tuple(found), names(name, found[0])) for name, found in together.items()]


def names(name: str, parameter: Parameter) -> tuple[str, ...]:
    experts = parameter.spec.shape[0] if parameter.stored.stacked else 1
    return tuple(name.format(e) for e in range(experts))
