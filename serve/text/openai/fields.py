"""Fields of bodies that have several forms: the format of the output, and tools."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from ....refusals import quote
from ..tools.tool import Toolbox
from .errors import RequestError, is_flag_set, require_field

# Older names of fields of `structured_outputs`.
GUIDED_FIELDS = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
FORMAT_TYPES = ("text", "json_object", "json_schema")
FUNCTION_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
TOOL_CHOICE_FORMS = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
# Fields of a response's tool, besides its type.
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def with_structured_outputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body with the format of the output under `structured_outputs` alone. Raises
    RequestError for a wrong format, and for two of them."""
    others = dict(fields)
    forms = [
        {structured_name: others.pop(name)}
        for name, structured_name in GUIDED_FIELDS.items()
        if name in others
    ]
    if "response_format" in others and (
        response_format := parse_response_format("response_format", others.pop("response_format"))
    ):
        forms.append(response_format)
    if "structured_outputs" in others:
        forms.append(others.pop("structured_outputs"))
    names = " and ".join(
        name for name in (*GUIDED_FIELDS, "response_format", "structured_outputs") if name in fields
    )
    require_field(len(forms) < 2, "structured_outputs", names, "only one field says what the output must be")
    return others | ({"structured_outputs": forms[0]} if forms else {})


def parse_response_format(name: str, value: Any) -> dict[str, Any] | None:
    """Return the format that `response_format` asks for. Its schema is in an object of its own, next to its
    type, or among its fields as in the Responses API."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    require_field(kind in FORMAT_TYPES, f"{name}.type", kind, " or ".join(FORMAT_TYPES))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema_format = value.get("json_schema", value)
    strict = schema_format.get("strict") if isinstance(schema_format, Mapping) else None
    require_field(strict is None or isinstance(strict, bool), f"{name}.strict", strict, "true or false")
    schema = schema_format.get("schema") if isinstance(schema_format, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("invalid_request", f"{name} needs a schema, an object of JSON Schema", name)
    return {"json": schema}


def text_to_chat_fields(text: Any) -> dict[str, Any]:
    """Translate the `text` of a response's body to fields of a chat."""
    require_field(isinstance(text, Mapping), "text", text, "an object")
    unknown = sorted(text.keys() - {"format", "verbosity"})
    require_field(not unknown, "text", ", ".join(unknown), "format and verbosity")
    return {"response_format": text["format"]} if text.get("format") is not None else {}


def reasoning_to_chat_fields(reasoning: Any) -> dict[str, Any]:
    """Translate the `reasoning` of a response's body to fields of a chat."""
    require_field(isinstance(reasoning, Mapping), "reasoning", reasoning, "an object")
    others = {name: value for name, value in reasoning.items() if name != "effort" and value is not None}
    require_field(not others, "reasoning", ", ".join(sorted(others)), "effort alone: there are no summaries")
    return {"reasoning_effort": reasoning["effort"]} if reasoning.get("effort") is not None else {}


# ---------------------------------------------------------------- tools


def parse_toolbox(body: Mapping[str, Any]) -> Toolbox | None:
    """Return the tools of a chat's body, if any. Raises RequestError naming the field, its value and what is
    allowed."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    allows_parallel_calls = is_flag_set(body, "parallel_tool_calls", default=True)
    if not tools:
        require_field(tools in (None, []), "tools", tools, "a list of functions")
        require_field(choice in (None, "none", "auto"), "tool_choice", choice, "none or auto without tools")
        return None
    require_field(isinstance(tools, list), "tools", tools, "a list of functions")
    names = [check_function(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    name, count = Counter(names).most_common(1)[0]
    require_field(count == 1, "tools", name, "each function has a name of its own")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return parse_allowed_tools(tools, choice.get("allowed_tools"), names, allows_parallel_calls)
    if isinstance(choice, Mapping):
        return Toolbox(tools, "required", read_chosen_function(choice, names), allows_parallel_calls)
    choice = "auto" if choice is None else choice
    require_field(choice in ("none", "auto", "required"), "tool_choice", choice, TOOL_CHOICE_FORMS)
    return Toolbox(tools, choice, None, allows_parallel_calls)


def parse_allowed_tools(
    tools: list[Any], allowed_tools: Any, names: list[str], allows_parallel_calls: bool
) -> Toolbox:
    """Return the tools with the names that a choice of type `allowed_tools` allows."""
    require_field(
        isinstance(allowed_tools, Mapping),
        "tool_choice.allowed_tools",
        allowed_tools,
        "an object with mode and tools",
    )
    mode, choices = allowed_tools.get("mode"), allowed_tools.get("tools")
    require_field(mode in ("auto", "required"), "tool_choice.allowed_tools.mode", mode, "auto or required")
    require_field(
        isinstance(choices, list) and bool(choices), "tool_choice.allowed_tools.tools", choices, "functions"
    )
    known = dict.fromkeys(names)  # a body may have many of both
    return Toolbox(
        tools,
        mode,
        None,
        allows_parallel_calls,
        frozenset(read_chosen_function(choice, known) for choice in choices),
    )


def check_function(where: str, tool: Any) -> str:
    """Check a function, and return its name."""
    require_field(isinstance(tool, Mapping), where, tool, "an object with type and function")
    require_field(tool.get("type") == "function", f"{where}.type", tool.get("type"), '"function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError("invalid_request", f"{where}.function must be an object", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    ok = isinstance(name, str) and FUNCTION_NAME.fullmatch(name)
    require_field(bool(ok), f"{where}.function.name", name, "1 to 128 letters, digits, _, - and .")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for field, value in (("parameters", parameters), ("parameters.properties", properties)):
        require_field(
            value is None or isinstance(value, Mapping), f"{where}.function.{field}", value, "an object"
        )
    kind = parameters.get("type", "object") if parameters else "object"
    require_field(kind == "object", f"{where}.function.parameters.type", kind, '"object"')
    description, strict = function.get("description"), function.get("strict")
    require_field(
        description is None or isinstance(description, str),
        f"{where}.function.description",
        description,
        "a string",
    )
    require_field(
        strict is None or isinstance(strict, bool), f"{where}.function.strict", strict, "true or false"
    )
    return str(name)


def read_chosen_function(choice: Any, names: Collection[str]) -> str:
    """Return the name of a function in a choice."""
    choice_fields = choice if isinstance(choice, Mapping) else {}
    function = choice_fields.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice_fields.get("type") != "function" or name not in names:
        allowed = f"{TOOL_CHOICE_FORMS}, of which the name is {' or '.join([*names][:8])}"
        raise RequestError(
            "invalid_request", f"tool_choice={quote(choice)} is not allowed: {allowed}", "tool_choice"
        )
    return str(name)


def tools_to_chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the tools of a response's body to fields of a chat: responses have the fields of a function
    next to its type."""
    chat_fields: dict[str, Any] = {}
    if isinstance(tools := body.get("tools"), list):
        chat_fields["tools"] = [nest_function(tool) for tool in tools]
    elif tools is not None:
        chat_fields["tools"] = tools
    if (choice := body.get("tool_choice")) is not None:
        chat_fields["tool_choice"] = nest_tool_choice(choice)
    return chat_fields


def nest_tool_choice(choice: Any) -> Any:
    """Return a choice of tools in the form of chats."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return nest_function(choice)
    allowed = choice.get("tools")
    tools = [nest_function(tool) for tool in allowed] if isinstance(allowed, list) else allowed
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def nest_function(tool: Any) -> Any:
    """Return a function in the form of chats."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    others = {name: value for name, value in tool.items() if name not in FUNCTION_FIELDS}
    return others | {"function": {name: tool[name] for name in FUNCTION_FIELDS if tool.get(name) is not None}}
