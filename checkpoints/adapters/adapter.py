"""An adapter's folder: `adapter_config.json` and `adapter_model.safetensors`, as terms beside our parameters.

A folder is refused, in one sentence that names the file and the field or tensor, rather than served in part.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...model.config import ModelConfig
from ...model.tree import Spec
from ...model.weights.adapted import adaptable, inputs_of, is_stacked
from ..families.family import Family
from ..families.stored import Stored
from ..folders import read_json
from ..layout import Parameter, ParameterGroup, groups
from ..nested import text_tensors
from ..tensors import CheckpointError, Tensor, contents, is_finite, read
from .config import AdapterConfig

Terms = tuple[np.ndarray, np.ndarray]  # a and b beside one weight
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class Adapter:
    """Terms a b beside weights, by the weights' paths: a [*inputs, r] and b [r, *outputs], which has the
    scale in it; of experts, all side by side. `digest` is a hash of all of them: equal ones are equal
    adapters, whatever their names."""

    name: str
    rank: int  # the largest
    terms: Mapping[str, Terms]
    digest: bytes


@dataclass(frozen=True)
class Reader:
    """Reads adapters of a model of a family that computes in a dtype, up to a rank; `has_mesh`: on several
    devices; `routed`: of routed experts too."""

    family: Family
    config: ModelConfig
    dtype: Any
    most: int
    has_mesh: bool = False
    routed: bool = False

    def read(self, folder: Path, name: str) -> Adapter:
        """The adapter in a folder, under a name. Raises CheckpointError for what is missing, misshapen, not
        finite, and for what is not supported."""
        for file in (CONFIG, WEIGHTS):
            if not os.path.isfile(folder / file):
                raise CheckpointError(
                    f"{folder}: has no {file}, expected an adapter's folder as PEFT writes it"
                )
        raw = read_json(folder / CONFIG)
        try:
            config = AdapterConfig.of(raw)
        except ValueError as e:
            raise CheckpointError(f"{folder / CONFIG}: {e}") from e
        file, largest = folder / WEIGHTS, 0
        terms: dict[str, Terms] = {}
        of_experts: dict[str, dict[int, Terms]] = {}
        for module, group, e, a, b in self._modules(file):
            rank = config.rank_of(module)
            self._check(group, module, rank, a, b)
            found = terms_of(group, a, b, rank, config.scale_of(module), np.dtype(self.dtype))
            if group.parameters[0].stored.stacked:
                for path, own in found.items():
                    of_experts.setdefault(path, {})[e] = own
            else:
                terms |= found
            largest = max(largest, rank)
        counts = {
            p.path: p.spec.shape[0] for group in groups(self.family, self.config) for p in group.parameters
        }
        terms |= {path: side_by_side(found, counts[path]) for path, found in of_experts.items()}
        if not terms:
            raise CheckpointError(f"{file}: holds no tensor, expected pairs of lora_A and lora_B")
        return Adapter(name, largest, terms, digest(terms))

    def _modules(self, file: Path) -> Iterator[tuple[str, ParameterGroup, int, Tensor, Tensor]]:
        """The modules that have terms, the parameters that lie in each, the number of the expert that it is
        of, 0 for others, and its tensors."""
        known = adaptable(self.config, self.has_mesh, self.routed)
        places = {
            name: (group, e)
            for group in groups(self.family, self.config)
            for e, name in enumerate(group.names)
        }
        for name, pair in pairs(file).items():
            group, e = places.get(name, (None, 0))
            module = name.removesuffix(".weight")
            if group is None or not all(may_adapt(p, known) for p in group.parameters):
                raise CheckpointError(
                    f"{file}: module {module!r} cannot have an adapter here: only projections of attention, "
                    "recurrent and dense feed-forward layers, and on one device of shared experts, and of "
                    "routed ones with lora_experts, can"
                )
            if len(pair) < 2:
                raise CheckpointError(f"{file}: module {module!r} lacks one of lora_A and lora_B")
            yield module, group, e, pair["A"], pair["B"]

    def _check(self, group: ParameterGroup, module: str, rank: int, a: Tensor, b: Tensor) -> None:
        if rank > self.most:
            raise CheckpointError(
                f"{a.file}: module {module!r} has rank {rank}, max_lora_rank allows {self.most}"
            )
        first, second = as_a(group.parameters[0], rank), as_b(group, rank)
        for tensor, expected in ((a, ParameterGroup((first,), ()).shape), (b, second.shape)):
            if tensor.shape != expected or tensor.dtype is None:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape} in {tensor.code}, "
                    f"expected {expected} in F32, F16 or BF16"
                )


def pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    """An adapter's tensors by the names of the weights beside which they stand, and by factor."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in contents(file).items():
        parts = FACTOR.fullmatch(name)
        if parts is None:
            raise CheckpointError(
                f"{file}: tensor {name!r} is none of an adapter's: expected MODULE.lora_A.weight and lora_B"
            )
        (own,) = text_tensors({f"{parts['module']}.weight": tensor}) or [f"{parts['module']}.weight"]
        found.setdefault(own, {})[parts["factor"]] = tensor
    return found


def may_adapt(parameter: Parameter, known: Mapping[str, Spec]) -> bool:
    """True for a parameter that adapters may change, of one expert where it is experts'."""
    return parameter.path in known and is_stacked(parameter.spec) == parameter.stored.stacked


def side_by_side(terms: Mapping[int, Terms], count: int) -> Terms:
    """Terms of some of `count` experts as those of all: a [E, *inputs, r] and b [E, r, *outputs], zeros where
    an expert has none."""
    rank = max(a.shape[-1] for a, _ in terms.values())
    a, b = next(iter(terms.values()))
    first = np.zeros((count, *a.shape[:-1], rank), a.dtype)
    second = np.zeros((count, rank, *b.shape[1:]), b.dtype)
    for e, (a, b) in terms.items():
        first[e, ..., : a.shape[-1]], second[e, : len(b)] = a, b
    return first, second


def as_a(parameter: Parameter, rank: int) -> Parameter:
    """Storage of a module's lora_A [r, in] for a parameter, or one expert's, kept as [*inputs, r]."""
    of, k = int(is_stacked(parameter.spec)), inputs_of(parameter.spec)
    letters = parameter.stored.ours[of:k]
    return lying(parameter, f"r,{letters}->{letters}r", (*parameter.spec.shape[of:k], rank))


def as_b(group: ParameterGroup, rank: int) -> ParameterGroup:
    """Storage of a module's lora_B [out, r] for the parameters that share its weight, kept as [r, *outputs]
    each."""

    def one(p: Parameter) -> Parameter:
        k, stored = inputs_of(p.spec), p.stored
        inputs, outputs = stored.ours[int(is_stacked(p.spec)) : k], stored.ours[k:]
        (own,) = (axis for axis in stored.axes.partition("->")[0].split(",") if axis.strip("[]<>") != inputs)
        return lying(p, f"{own},r->r{outputs}", (rank, *p.spec.shape[k:]))

    return ParameterGroup(tuple(map(one, group.parameters)), ())


def lying(parameter: Parameter, axes: str, shape: tuple[int, ...]) -> Parameter:
    spec = Spec(shape, tuple(axes.partition("->")[2]))
    return replace(parameter, spec=spec, stored=Stored(parameter.stored.name, axes))


def terms_of(
    group: ParameterGroup, a: Tensor, b: Tensor, rank: int, scale: float, dtype: np.dtype
) -> dict[str, Terms]:
    """A module's terms beside each of the parameters that its weight holds; the scale goes into b."""
    of_b = as_b(group, rank)
    second = [np.empty(p.spec.shape, np.float32) for p in of_b.parameters]
    read(b, of_b.parts(second, 0))
    found = {}
    for parameter, theirs in zip(group.parameters, second, strict=True):
        own = as_a(parameter, rank)
        first = np.empty(own.spec.shape, np.float32)
        read(a, ParameterGroup((own,), ()).parts([first], 0))
        with np.errstate(over="ignore", invalid="ignore"):
            made = first.astype(dtype), (theirs * np.float32(scale)).astype(dtype)
        if not all(map(is_finite, made)):
            raise CheckpointError(f"{a.file}: module of tensor {a.name!r} holds NaN or infinity as {dtype}")
        found[parameter.path] = made
    return found


def digest(terms: Mapping[str, Terms]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for path, (a, b) in sorted(terms.items()):
        found.update(f"{path} {a.shape} {b.shape} {a.dtype}\0".encode())
        found.update(a.tobytes())
        found.update(b.tobytes())
    return found.digest()
