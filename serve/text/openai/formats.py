"""How bodies say what an output must be: OpenAI's formats of responses, and the names that vLLM has had."""

from collections.abc import Mapping
from typing import Any

from .refusing import RequestError, require

# Older names of fields of `structured_outputs`.
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
FORMATS = ("text", "json_object", "json_schema")


def with_structured(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, of which `structured_outputs` has what others say of the output. Raises
    RequestError for what is not allowed, and for two of them."""
    others = dict(fields)
    said = [{own: others.pop(name)} for name, own in GUIDED.items() if name in others]
    if "response_format" in others and (own := of_format("response_format", others.pop("response_format"))):
        said.append(own)
    if "structured_outputs" in others:
        said.append(others.pop("structured_outputs"))
    ways = " and ".join(name for name in (*GUIDED, "response_format", "structured_outputs") if name in fields)
    require(len(said) < 2, "structured_outputs", ways, "only one field says what the output must be")
    return others | ({"structured_outputs": said[0]} if said else {})


def of_format(name: str, given: Any) -> dict[str, Any] | None:
    """What `response_format` asks for; its schema is an object of its own, beside its type or, as in the
    Responses API, among its fields."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    require(kind in FORMATS, f"{name}.type", kind, " or ".join(FORMATS))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    own = given.get("json_schema", given)
    schema = own.get("schema") if isinstance(own, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("invalid_request", f"{name} needs a schema, an object of JSON Schema", name)
    return {"json": schema}


def of_text(given: Any) -> dict[str, Any]:
    """The `text` of a response's body as fields of a chat's."""
    require(isinstance(given, Mapping), "text", given, "an object")
    unknown = sorted(given.keys() - {"format", "verbosity"})
    require(not unknown, "text", ", ".join(unknown), "format and verbosity")
    return {"response_format": given["format"]} if given.get("format") is not None else {}
