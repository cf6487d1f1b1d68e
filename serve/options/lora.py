"""The option `lora_modules`: adapters that requests may name."""

import json
from collections.abc import Sequence

from ...lora.request import LoRARequest
from ...refusals import RepeatedKey, quote, reject_repeated_keys


def parse_lora_modules(texts: Sequence[str] | None) -> list[LoRARequest]:
    """Return the adapters of the option `lora_modules`.

    Each is NAME=PATH, or a JSON object with name, path and perhaps base_model_name. Raises ValueError for
    other text, and for a name that is given twice.
    """
    requests: list[LoRARequest] = []
    for number, text in enumerate(texts or (), 1):
        name, path, base = parse_lora_module(text)
        if any(name == request.lora_name for request in requests):
            raise ValueError(f"lora_modules {quote(text)} is not allowed: {name!r} has a path already")
        requests.append(LoRARequest(name, number, path, base))
    return requests


def parse_lora_module(text: str) -> tuple[str, str, str | None]:
    """Return name, path and base model's name of one adapter. Raises ValueError."""
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if name and path:
            return name, path, None
        raise ValueError(f"lora_modules {quote(text)} is not allowed: NAME=PATH, or a JSON object")
    try:
        module = json.loads(text, object_pairs_hook=reject_repeated_keys)
    except RepeatedKey as error:
        raise ValueError(f"lora_modules {quote(text)} is not allowed: {error}") from None
    except ValueError:
        module = {}
    strings = all(isinstance(value, str) for value in module.values() if value is not None)
    if not {"name", "path"} <= set(module) <= {"name", "path", "base_model_name"} or not strings:
        raise ValueError(
            f"lora_modules {quote(text)} is not allowed: an object with name, path and base_model_name"
        )
    return module["name"], module["path"], module.get("base_model_name")
