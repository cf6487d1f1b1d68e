"""The option `lora_modules`: adapters that requests may name."""

import json
from collections.abc import Sequence

from ...lora.request import LoRARequest
from ...refusals import RepeatedKey, shown, unique


def modules_of(given: Sequence[str] | None) -> list[LoRARequest]:
    """The adapters of the option `lora_modules`: each NAME=PATH, or a JSON object with name, path and perhaps
    base_model_name. Raises ValueError for others, and for one name twice."""
    found: list[LoRARequest] = []
    for number, text in enumerate(given or (), 1):
        name, path, base = parsed(text)
        if any(name == other.lora_name for other in found):
            raise ValueError(f"lora_modules {shown(text)} is not allowed: {name!r} has a path already")
        found.append(LoRARequest(name, number, path, base))
    return found


def parsed(text: str) -> tuple[str, str, str | None]:
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if name and path:
            return name, path, None
        raise ValueError(f"lora_modules {shown(text)} is not allowed: NAME=PATH, or a JSON object")
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except RepeatedKey as error:
        raise ValueError(f"lora_modules {shown(text)} is not allowed: {error}") from None
    except ValueError:
        found = {}
    strings = all(isinstance(value, str) for value in found.values() if value is not None)
    if not {"name", "path"} <= set(found) <= {"name", "path", "base_model_name"} or not strings:
        raise ValueError(
            f"lora_modules {shown(text)} is not allowed: an object with name, path and base_model_name"
        )
    return found["name"], found["path"], found.get("base_model_name")
