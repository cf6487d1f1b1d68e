"""Fields of bodies that have several forms: the format of the output, and tools."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ....refusals import shown
from ..tools.tool import Toolbox
from .errors import RequestError, flag, require

# Older names of fields of `structured_outputs`.
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
FORMATS = ("text", "json_object", "json_schema")
NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
ALLOWED = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
FLAT = ("name", "description", "parameters", "strict")  # fields of a response's tool, besides its type


def with_structured(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body with the format of the output under `structured_outputs` alone. Raises
    RequestError for a wrong format, and for two of them."""
    others = dict(fields)
    forms = [{own: others.pop(name)} for name, own in GUIDED.items() if name in others]
    if "response_format" in others and (own := of_format("response_format", others.pop("response_format"))):
        forms.append(own)
    if "structured_outputs" in others:
        forms.append(others.pop("structured_outputs"))
    ways = " and ".join(name for name in (*GUIDED, "response_format", "structured_outputs") if name in fields)
    require(len(forms) < 2, "structured_outputs", ways, "only one field says what the output must be")
    return others | ({"structured_outputs": forms[0]} if forms else {})


def of_format(name: str, given: Any) -> dict[str, Any] | None:
    """Return the format that `response_format` asks for. Its schema is in an object of its own, next to its
    type, or among its fields as in the Responses API."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    require(kind in FORMATS, f"{name}.type", kind, " or ".join(FORMATS))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    own = given.get("json_schema", given)
    strict = own.get("strict") if isinstance(own, Mapping) else None
    require(strict is None or isinstance(strict, bool), f"{name}.strict", strict, "true or false")
    schema = own.get("schema") if isinstance(own, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("invalid_request", f"{name} needs a schema, an object of JSON Schema", name)
    return {"json": schema}


def of_text(given: Any) -> dict[str, Any]:
    """Translate the `text` of a response's body to fields of a chat."""
    require(isinstance(given, Mapping), "text", given, "an object")
    unknown = sorted(given.keys() - {"format", "verbosity"})
    require(not unknown, "text", ", ".join(unknown), "format and verbosity")
    return {"response_format": given["format"]} if given.get("format") is not None else {}


def of_reasoning(given: Any) -> dict[str, Any]:
    """Translate the `reasoning` of a response's body to fields of a chat."""
    require(isinstance(given, Mapping), "reasoning", given, "an object")
    others = {name: value for name, value in given.items() if name != "effort" and value is not None}
    require(not others, "reasoning", ", ".join(sorted(others)), "effort alone: there are no summaries")
    return {"reasoning_effort": given["effort"]} if given.get("effort") is not None else {}


# ---------------------------------------------------------------- tools


def toolbox_of(body: Mapping[str, Any]) -> Toolbox | None:
    """Return the tools of a chat's body, if any. Raises RequestError naming the field, its value and what is
    allowed."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    several = flag(body, "parallel_tool_calls", default=True)
    if not tools:
        require(tools in (None, []), "tools", tools, "a list of functions")
        require(choice in (None, "none", "auto"), "tool_choice", choice, "none or auto without tools")
        return None
    require(isinstance(tools, list), "tools", tools, "a list of functions")
    names = [name_of(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    name, count = Counter(names).most_common(1)[0]
    require(count == 1, "tools", name, "each function has a name of its own")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return allowed_of(tools, choice.get("allowed_tools"), names, several)
    if isinstance(choice, Mapping):
        return Toolbox(tools, "required", chosen(choice, names), several)
    choice = "auto" if choice is None else choice
    require(choice in ("none", "auto", "required"), "tool_choice", choice, ALLOWED)
    return Toolbox(tools, choice, None, several)


def allowed_of(tools: list[Any], given: Any, names: list[str], several: bool) -> Toolbox:
    """Return the tools of which a choice allows some."""
    require(isinstance(given, Mapping), "tool_choice.allowed_tools", given, "an object with mode and tools")
    mode, listed = given.get("mode"), given.get("tools")
    require(mode in ("auto", "required"), "tool_choice.allowed_tools.mode", mode, "auto or required")
    require(isinstance(listed, list) and bool(listed), "tool_choice.allowed_tools.tools", listed, "functions")
    return Toolbox(tools, mode, None, several, frozenset(chosen(one, names) for one in listed))


def name_of(where: str, tool: Any) -> str:
    """Check a function, and return its name."""
    require(isinstance(tool, Mapping), where, tool, "an object with type and function")
    require(tool.get("type") == "function", f"{where}.type", tool.get("type"), '"function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError("invalid_request", f"{where}.function must be an object", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    ok = isinstance(name, str) and NAME.fullmatch(name)
    require(bool(ok), f"{where}.function.name", name, "1 to 128 letters, digits, _, - and .")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for field, value in (("parameters", parameters), ("parameters.properties", properties)):
        require(value is None or isinstance(value, Mapping), f"{where}.function.{field}", value, "an object")
    kind = parameters.get("type", "object") if parameters else "object"
    require(kind == "object", f"{where}.function.parameters.type", kind, '"object"')
    forms, strict = function.get("description"), function.get("strict")
    require(forms is None or isinstance(forms, str), f"{where}.function.description", forms, "a string")
    require(strict is None or isinstance(strict, bool), f"{where}.function.strict", strict, "true or false")
    return str(name)


def chosen(choice: Any, names: list[str]) -> str:
    """Return the name of a function in a choice."""
    given = choice if isinstance(choice, Mapping) else {}
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type") != "function" or name not in names:
        allowed = f"{ALLOWED}, of which the name is {' or '.join(names[:8])}"
        raise RequestError(
            "invalid_request", f"tool_choice={shown(choice)} is not allowed: {allowed}", "tool_choice"
        )
    return str(name)


def of_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the tools of a response's body to fields of a chat: responses have the fields of a function
    next to its type."""
    found: dict[str, Any] = {}
    if isinstance(tools := body.get("tools"), list):
        found["tools"] = [nested(tool) for tool in tools]
    elif tools is not None:
        found["tools"] = tools
    if (choice := body.get("tool_choice")) is not None:
        found["tool_choice"] = nested_choice(choice)
    return found


def nested_choice(choice: Any) -> Any:
    """Return a choice of tools in the form of chats."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return nested(choice)
    listed = choice.get("tools")
    tools = [nested(one) for one in listed] if isinstance(listed, list) else listed
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def nested(tool: Any) -> Any:
    """Return a function in the form of chats."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    others = {name: value for name, value in tool.items() if name not in FLAT}
    return others | {"function": {name: tool[name] for name in FLAT if tool.get(name) is not None}}
