"""Families of models by the `model_type` of their `config.json`: each is one module that translates, and nothing else."""

from collections.abc import Mapping
from typing import Any, Protocol

from ...model.config import ModelConfig
from . import llama
from .stored import Stored


class Family(Protocol):
    """What a family's module holds.

    NAMES: path of our parameter, `{}` for the layer's number -> tensor in the file, for every parameter it may have.
    IGNORED: patterns of tensors that a file may hold beside them and that change nothing.
    """

    @property
    def NAMES(self) -> Mapping[str, Stored]: ...
    @property
    def IGNORED(self) -> tuple[str, ...]: ...
    def config(self, raw: Mapping[str, Any], /) -> ModelConfig: ...
    def export(self, config: ModelConfig, /) -> dict[str, Any]: ...


FAMILIES: Mapping[str, Family] = {"llama": llama}
