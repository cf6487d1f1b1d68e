"""Configurations of families' cases with some fields changed; "absent" leaves one out."""

from typing import Any

from cases.families.golden import CASES, hub_config

from duetto.checkpoints.families import FAMILIES
from duetto.model.config import ModelConfig


def config_of(kind: str, **fields):
    name = kind if kind in CASES else next(name for name in CASES if name.startswith(kind))
    raw = {key: value for key, value in (hub_config(name) | fields).items() if value != "absent"}
    return FAMILIES[kind].parse_config(raw)


def windows(config) -> list[int | None]:
    return [mixer.window for mixer in mixers(config)]


def attention(kind: str, **fields) -> Any:
    return config_of(kind, **fields).layers[0].mixer


def ffn(kind: str, **fields) -> Any:
    return config_of(kind, **fields).layers[-1].ffn


def mixers(config: ModelConfig) -> list[Any]:
    return [layer.mixer for layer in config.layers]
