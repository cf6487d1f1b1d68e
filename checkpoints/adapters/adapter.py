"""LoRA adapters in PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

A folder is refused rather than served in part. The error is one sentence that names the file and the field or
tensor.
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
from ...model.weights.lora import adaptable_specs, is_stacked_spec, num_input_axes
from ..configuration.text_models import text_tensor_name
from ..families.family import Family
from ..families.storage import Stored
from ..folders import read_json
from ..layout import Parameter, ParameterGroup, parameter_groups
from ..tensors import CheckpointError, Tensor, is_finite, list_tensors, read_into_views
from .config import AdapterConfig

AdapterTerms = tuple[np.ndarray, np.ndarray]  # a and b of one weight
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FACTOR_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


@dataclass(frozen=True, eq=False)
class Adapter:
    """LoRA adapter of a model: a low-rank product a b beside each adapted weight.

    name: name under which requests ask for it.
    rank: largest rank of its terms.
    terms: a [*inputs, r] and b [r, *outputs] by the weight's path; b includes the scale. Experts are stacked.
    digest: hash of all terms; adapters with equal digests are equal, whatever their names.
    """

    name: str
    rank: int
    terms: Mapping[str, AdapterTerms]
    digest: bytes


@dataclass(frozen=True)
class AdapterReader:
    """Reader of a model's adapters.

    family, config: of the model.
    dtype: dtype of the terms.
    max_rank: largest rank that is allowed.
    has_mesh: the model is on several devices.
    adapts_routed: terms of routed experts are allowed.
    """

    family: Family
    config: ModelConfig
    dtype: Any
    max_rank: int
    has_mesh: bool = False
    adapts_routed: bool = False

    def read(self, folder: Path, name: str) -> Adapter:
        """Read the adapter in a folder.

        Raises CheckpointError for tensors that are missing, misshapen, not finite or not supported.
        """
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not os.path.isfile(folder / file):
                raise CheckpointError(
                    f"{folder}: has no {file}, expected an adapter's folder as PEFT writes it"
                )
        raw = read_json(folder / CONFIG_FILE)
        try:
            config = AdapterConfig.from_fields(raw)
        except ValueError as e:
            raise CheckpointError(f"{folder / CONFIG_FILE}: {e}") from e
        file, largest = folder / WEIGHTS_FILE, 0
        terms: dict[str, AdapterTerms] = {}
        expert_terms: dict[str, dict[int, AdapterTerms]] = {}
        for module, (group, e), a, b in self._list_modules(file):
            rank = config.module_rank(module)
            self._check_module(group, module, rank, a, b)
            module_terms = read_module_terms(
                group, a, b, rank, config.module_scale(module), np.dtype(self.dtype)
            )
            if group.parameters[0].stored.is_stacked:
                for path, pair in module_terms.items():
                    expert_terms.setdefault(path, {})[e] = pair
            else:
                terms |= module_terms
            largest = max(largest, rank)
        counts = {
            p.path: p.spec.shape[0]
            for group in parameter_groups(self.family.names, self.config)
            for p in group.parameters
        }
        terms |= {
            path: stack_expert_terms(module_terms, counts[path])
            for path, module_terms in expert_terms.items()
        }
        if not terms:
            raise CheckpointError(f"{file}: holds no tensor, expected pairs of lora_A and lora_B")
        return Adapter(name, largest, terms, digest_terms(terms))

    def _list_modules(self, file: Path) -> Iterator[tuple[str, tuple[ParameterGroup, int], Tensor, Tensor]]:
        """Yield each adapted module: name, its parameters and its expert's number (0 for others), lora_A and
        lora_B.

        The name is the one in the model that was trained.
        """
        known = adaptable_specs(self.config, self.has_mesh, self.adapts_routed)
        groups_by_name = {
            name: (group, e)
            for group in parameter_groups(self.family.names, self.config)
            for e, name in enumerate(group.names)
        }
        for module, pair in pair_factors(file).items():
            name = text_tensor_name(f"{module}.weight")
            location = groups_by_name.get(name) or groups_by_name.get(self.family.prefix + name)
            if location is None or not all(may_adapt(p, known) for p in location[0].parameters):
                raise CheckpointError(
                    f"{file}: module {module!r} cannot have an adapter here: only projections of attention, "
                    "recurrent and dense feed-forward layers, and on one device of shared experts, and of "
                    "routed ones with lora_experts, can"
                )
            if len(pair) < 2:
                raise CheckpointError(f"{file}: module {module!r} lacks one of lora_A and lora_B")
            yield module, location, pair["A"], pair["B"]

    def _check_module(self, group: ParameterGroup, module: str, rank: int, a: Tensor, b: Tensor) -> None:
        """Raise CheckpointError for a rank above the limit, or tensors of a wrong shape."""
        if rank > self.max_rank:
            raise CheckpointError(
                f"{a.file}: module {module!r} has rank {rank}, max_lora_rank allows {self.max_rank}"
            )
        first, second = lora_a_storage(group.parameters[0], rank), lora_b_storage(group, rank)
        for tensor, expected in ((a, ParameterGroup((first,), ()).shape), (b, second.shape)):
            if tensor.shape != expected or tensor.dtype is None:
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape} in {tensor.code}, "
                    f"expected {expected} in F32, F16 or BF16"
                )


def pair_factors(file: Path) -> dict[str, dict[str, Tensor]]:
    """Return an adapter's tensors by module, as the trained model names it, and by factor ("A" or "B")."""
    pairs_by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in list_tensors(file).items():
        parts = FACTOR_NAME.fullmatch(name)
        if parts is None:
            raise CheckpointError(
                f"{file}: tensor {name!r} is none of an adapter's: expected MODULE.lora_A.weight and lora_B"
            )
        pairs_by_module.setdefault(parts["module"], {})[parts["factor"]] = tensor
    return pairs_by_module


def may_adapt(parameter: Parameter, known: Mapping[str, Spec]) -> bool:
    """Return True if adapters may change a parameter. For experts, each expert must have its tensor."""
    return parameter.path in known and is_stacked_spec(parameter.spec) == parameter.stored.is_stacked


def stack_expert_terms(terms: Mapping[int, AdapterTerms], count: int) -> AdapterTerms:
    """Stack the terms of some of `count` experts: a [E, *inputs, r] and b [E, r, *outputs], zeros for the
    others."""
    rank = max(a.shape[-1] for a, _ in terms.values())
    a, b = next(iter(terms.values()))
    first = np.zeros((count, *a.shape[:-1], rank), a.dtype)
    second = np.zeros((count, rank, *b.shape[1:]), b.dtype)
    for e, (a, b) in terms.items():
        first[e, ..., : a.shape[-1]], second[e, : len(b)] = a, b
    return first, second


def lora_a_storage(parameter: Parameter, rank: int) -> Parameter:
    """Return the storage of lora_A [r, in] for a parameter, or one of its experts, kept as [*inputs, r]."""
    first_axis, k = int(is_stacked_spec(parameter.spec)), num_input_axes(parameter.spec)
    letters = parameter.stored.our_axes[first_axis:k]
    return with_axes(parameter, f"r,{letters}->{letters}r", (*parameter.spec.shape[first_axis:k], rank))


def lora_b_storage(group: ParameterGroup, rank: int) -> ParameterGroup:
    """Return the storage of lora_B [out, r] for the parameters that share a weight, each kept as [r,
    *outputs]."""

    def output_storage(p: Parameter) -> Parameter:
        k, stored = num_input_axes(p.spec), p.stored
        inputs, outputs = stored.our_axes[int(is_stacked_spec(p.spec)) : k], stored.our_axes[k:]
        (output_axis,) = (
            axis for axis in stored.axes.partition("->")[0].split(",") if axis.strip("[]<>") != inputs
        )
        return with_axes(p, f"{output_axis},r->r{outputs}", (rank, *p.spec.shape[k:]))

    return ParameterGroup(tuple(map(output_storage, group.parameters)), ())


def with_axes(parameter: Parameter, axes: str, shape: tuple[int, ...]) -> Parameter:
    """Return a parameter with another shape, stored with these axes."""
    spec = Spec(shape, tuple(axes.partition("->")[2]))
    return replace(parameter, spec=spec, stored=Stored(parameter.stored.name, axes))


def read_module_terms(
    group: ParameterGroup, a: Tensor, b: Tensor, rank: int, scale: float, dtype: np.dtype
) -> dict[str, AdapterTerms]:
    """Read a module's terms for each parameter that its weight stores, by path. The scale is multiplied into
    b."""
    b_group = lora_b_storage(group, rank)
    second = [np.empty(p.spec.shape, np.float32) for p in b_group.parameters]
    read_into_views(b, b_group.tensor_views(second, 0))
    terms = {}
    for parameter, b_values in zip(group.parameters, second, strict=True):
        a_parameter = lora_a_storage(parameter, rank)
        first = np.empty(a_parameter.spec.shape, np.float32)
        read_into_views(a, ParameterGroup((a_parameter,), ()).tensor_views([first], 0))
        with np.errstate(over="ignore", invalid="ignore"):
            pair = first.astype(dtype), (b_values * np.float32(scale)).astype(dtype)
        if not all(map(is_finite, pair)):
            raise CheckpointError(f"{a.file}: module of tensor {a.name!r} holds NaN or infinity as {dtype}")
        terms[parameter.path] = pair
    return terms


def digest_terms(terms: Mapping[str, AdapterTerms]) -> bytes:
    """Return a hash of 16 bytes of terms and their paths."""
    hasher = hashlib.blake2b(digest_size=16)
    for path, (a, b) in sorted(terms.items()):
        hasher.update(f"{path} {a.shape} {b.shape} {a.dtype}\0".encode())
        hasher.update(a.tobytes())
        hasher.update(b.tobytes())
    return hasher.digest()
