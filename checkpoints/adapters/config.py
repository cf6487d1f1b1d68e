"""`adapter_config.json`: ranks and scales of an adapter, and refusals of options that are not supported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...neutral_values import NEUTRAL, check_neutral
from ...refusals import quote
from ..families import fields

# Initialisations that change the base weights.
UNSUPPORTED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter's modules.

    rank, alpha: of modules that no pattern matches.
    uses_rslora: the scale is divided by the root of the rank (rsLoRA: Kalajdzievski, arXiv 2312.03732).
    ranks, alphas: by patterns of module names.
    """

    rank: int
    alpha: float
    uses_rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def from_fields(cls, raw: Mapping[str, Any]) -> "AdapterConfig":
        """Read the fields of an `adapter_config.json`. Raises ValueError with the field, its value and the
        alternatives."""
        for name in (name for name in NEUTRAL["adapter"] if name in raw):
            check_neutral("adapter", name, raw[name])
        init = raw.get("init_lora_weights", True)
        if isinstance(init, str) and init.lower().startswith(UNSUPPORTED_INITS):
            raise ValueError(f"init_lora_weights={quote(init)} is not supported: it changes the base weights")
        return cls(
            fields.integer(raw, "r"),
            fields.number(raw, "lora_alpha", 8),
            fields.flag(raw, "use_rslora", False),
            read_number_patterns(raw, "rank_pattern"),
            read_number_patterns(raw, "alpha_pattern"),
        )

    def module_rank(self, module: str) -> int:
        """Return the rank of a module."""
        return int(first_match(self.ranks, module, self.rank))

    def module_scale(self, module: str) -> float:
        """Return the factor of the product of a module's two matrices."""
        rank = self.module_rank(module)
        return first_match(self.alphas, module, self.alpha) / (rank**0.5 if self.uses_rslora else rank)


def read_number_patterns(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that maps patterns to positive numbers. Raises ValueError."""
    values = raw.get(name) or {}
    if not isinstance(values, dict) or not all(
        type(x) in (int, float) and 0 < x < fields.MAX_NUMBER for x in values.values()
    ):
        raise ValueError(f"{name} is {quote(values)}, expected an object from patterns to positive numbers")
    for pattern in values:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} has the pattern {quote(pattern)}: {error}") from None
    return values


def first_match(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name matches, as PEFT does, or
    `default`."""
    matches = (x for pattern, x in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(matches, default)
