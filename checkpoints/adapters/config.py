"""`adapter_config.json`: what scales an adapter's terms, and what it asks for that is not here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...neutral import NEUTRAL, check_neutral
from ...refusals import shown
from ..families import fields

# Ways to begin that change the weights beside which the adapter is learnt.
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of an adapter's modules: for all, and by patterns of their names. `rooted` divides by
    the root of the rank (rsLoRA: Kalajdzievski, arXiv 2312.03732)."""

    rank: int
    alpha: float
    rooted: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "AdapterConfig":
        """Raises ValueError with the field, its value, and what is allowed."""
        for name in (name for name in NEUTRAL["adapter"] if name in raw):
            check_neutral("adapter", name, raw[name])
        begun = raw.get("init_lora_weights", True)
        if isinstance(begun, str) and begun.lower().startswith(CHANGING):
            raise ValueError(
                f"init_lora_weights={shown(begun)} is not supported: it changes the base weights"
            )
        return cls(
            fields.integer(raw, "r"),
            fields.number(raw, "lora_alpha", 8),
            fields.flag(raw, "use_rslora", False),
            numbers_of(raw, "rank_pattern"),
            numbers_of(raw, "alpha_pattern"),
        )

    def rank_of(self, module: str) -> int:
        return int(matched(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor of the product of a module's two matrices."""
        rank = self.rank_of(module)
        return matched(self.alphas, module, self.alpha) / (rank**0.5 if self.rooted else rank)


def numbers_of(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict) or not all(
        type(x) in (int, float) and 0 < x < fields.MAX_NUMBER for x in found.values()
    ):
        raise ValueError(f"{name} is {shown(found)}, expected an object from patterns to positive numbers")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} has the pattern {shown(pattern)}: {error}") from None
    return found


def matched(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends in, as PEFT looks for it."""
    found = (x for pattern, x in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)
