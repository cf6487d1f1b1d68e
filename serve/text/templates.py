"""Where a model's folder keeps its chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class NamedTemplate(msgspec.Struct):
    """One of several templates in a `tokenizer_config.json`."""

    name: str
    template: str


def chat_template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's template: its own file, or in the configuration, there alone or as the one named
    "default".

    Raises ValueError for one that is no text.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    template = config.get("chat_template")
    try:
        named = msgspec.convert(template, str | list[NamedTemplate] | None)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is {template!r:.80}, "
            f"expected a template, or a list of objects with name and template: {error}"
        ) from error
    return {t.name: t.template for t in named}.get("default") if isinstance(named, list) else named
