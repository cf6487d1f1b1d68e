"""Chat templates in a model's folder, and Mistral's instruct format for folders without one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class NamedTemplate(msgspec.Struct):
    """A template in a list of `tokenizer_config.json`."""

    name: str
    template: str


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the folder's templates by name, of which "default" is for most conversations. Sources, the first
    that exists: `chat_template.jinja`, the configuration, and `chat_template.json`, which models that see
    images have. Raises ValueError for a template that is no text."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": read_utf8(file)}
    templates = parse_named_templates(folder / "tokenizer_config.json", config.get("chat_template"))
    file = folder / "chat_template.json"
    if not templates and file.is_file():
        try:
            templates = parse_named_templates(file, json.loads(read_utf8(file))["chat_template"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no JSON object with a chat_template: {error!r}") from error
    return templates


def read_utf8(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def parse_named_templates(file: Path, template: Any) -> dict[str, str]:
    """Return the template, or the named ones, of a file."""
    try:
        parsed = msgspec.convert(template, str | list[NamedTemplate] | None)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{file}: chat_template is {template!r:.80}, "
            f"expected a template, or a list of objects with name and template: {error}"
        ) from error
    if isinstance(parsed, str):
        return {"default": parsed}
    return {entry.name: entry.template for entry in parsed or ()}


# ---------------------------------------------------------------- Mistral's instruct format

_CHECKS = """
{%- if tools %}{{ raise_exception('calls of tools need a chat template in the folder') }}{% endif %}
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- for turn in turns %}
    {%- if turn.role != ('user' if loop.index0 is even else 'assistant') %}
        {{- raise_exception('messages of user and assistant must alternate') }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}"""

# The system's text precedes the last message of the user.
_INLINE = (
    _CHECKS
    + """
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}
{%- set last = (turns | length - 1) // 2 * 2 %}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {{- '[INST]' ~ ((system if loop.index0 == last else []) + [turn.content]) | join('\\n\\n') }}
        {{- '[/INST]' }}
    {%- else %}
        {{- turn.content ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
)
_MARKED = (
    _CHECKS
    + """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' ~ message.content ~ '[/INST]' }}
    {%- else %}
        THOUGHT{{- message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
)
_THOUGHT = (
    "{%- if message.reasoning_content %}{{- '[THINK]' ~ message.reasoning_content ~ '[/THINK]' }}{% endif %}"
)

# By the version in a `tekken.json`. Each writes tool calls in another way.
INSTRUCT_TEMPLATES = {
    "v3": _INLINE,
    "v7": _MARKED.replace("THOUGHT", ""),
    "v11": _MARKED.replace("THOUGHT", ""),
    "v13": _MARKED.replace("THOUGHT", _THOUGHT),
}
