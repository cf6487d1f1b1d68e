"""Tools that a reply may call, and values of their parameters that are written as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .lark import quote_json
from .literals import python_to_json, refuse_constant
from .schemas.allowed_values import (
    ANY_VALUE,
    AllowedValues,
    ValueResolver,
    allows_value,
    literal_key,
    value_kind,
)
from .schemas.bundled_schema import SchemaBundler
from .schemas.exact_schema import is_number, remove_ineffective_keywords
from .schemas.json_schema import (
    ADDITIONAL,
    VALUE_KEYWORDS,
    close_objects,
    has_keyword,
    has_reference,
    resolve_reference,
)

ToolChoice = Literal["none", "auto", "required"]
MAX_REFERENCES = 1_000  # of a tool's whole schema, one to the next
JSON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
# Keywords of all arguments together: no grammar of one parameter after another can keep them.
WHOLE_KEYWORDS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "propertyNames", "unevaluatedProperties"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
)


@dataclass(frozen=True)
class Tool:
    """A function: its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arguments_schema(self) -> Mapping[str, Any]:
        """Return the schema of the arguments that a grammar asks for. Its objects have the named properties
        only, unless the schema allows others. Raises ValueError for a schema that is too large."""
        return {
            "type": "object",
            **(close_objects(self._resolved_parameters) if self.parameters else {ADDITIONAL: False}),
        }

    @cached_property
    def _resolved_parameters(self) -> Mapping[str, Any]:
        """Return the schema of the arguments. If the whole schema is a reference to a part, return the
        part."""
        schema, seen = dict(self.parameters), set[str]()
        while (
            has_reference(schema) and schema["$ref"] not in seen and not has_keyword(schema, VALUE_KEYWORDS)
        ):
            if len(seen) == MAX_REFERENCES:
                break
            seen.add(reference := schema.pop("$ref"))
            target = resolve_reference(self.parameters, reference)
            schema |= target if isinstance(target, Mapping) else {"$ref": reference}
        return schema

    @property
    def properties(self) -> Mapping[str, Any]:
        return schema_properties(self._resolved_parameters)

    def allowed_values(self, parameter: str) -> AllowedValues:
        """Return the values that a parameter may have. Raises ValueError for a schema that is too large."""
        name = parameter if parameter in self.properties else None
        if name not in self._allowed_values:
            self._allowed_values[name] = self._resolver.resolve(self._parameter_schema(parameter))
        return self._allowed_values[name]

    def check_literals(self, parameter: str) -> None:
        """Raise ValueError naming a keyword of a parameter's schema that may refuse some of its
        `allowed_values`."""
        self._resolver.check_literals(self._parameter_schema(parameter))

    def _parameter_schema(self, parameter: str) -> Any:
        others = (
            True
            if "patternProperties" in self._resolved_parameters
            else self._resolved_parameters.get(ADDITIONAL, True)
        )
        return self.properties.get(parameter, others)

    @cached_property
    def _resolver(self) -> ValueResolver:
        return ValueResolver(self._resolved_parameters)

    @cached_property
    def _allowed_values(self) -> dict[str | None, AllowedValues]:
        return {}

    def read_argument(self, parameter: str, text: str) -> str:
        """Return a parameter's text as JSON."""
        return text_to_json(text, self._readable_values(parameter))

    def may_be_string(self, parameter: str) -> bool:
        return "string" in self._readable_values(parameter)

    def _readable_values(self, parameter: str) -> AllowedValues:
        """Return the values that a parameter may have; any value if its schema allows none, or is too
        large."""
        try:
            return self.allowed_values(parameter) or ANY_VALUE
        except ValueError:
            return ANY_VALUE

    @cached_property
    def grammar_parameters(self) -> dict[str, bool]:
        """Return the parameters that a grammar writes one after another: by name, whether each is required.

        Parameters without an allowed value are dropped. Raises ValueError naming a keyword that such a
        grammar cannot keep, or a required parameter without an allowed value.
        """
        items, properties = self.arguments_schema.get("required"), schema_properties(self.arguments_schema)
        required = dict.fromkeys(map(str, items) if isinstance(items, list) else (), True)
        parameters = dict.fromkeys(properties, False) | required
        for name in [name for name in parameters if not self.allowed_values(name)]:
            if parameters.pop(name):
                raise ValueError(f"a required parameter named {name!r}: its schema allows no value")
        check_separable(self.arguments_schema, len(parameters), len(required))
        return parameters

    def grammar_schema(self, parameter: str, kinds: Sequence[str] = ()) -> Mapping[str, Any]:
        """Return a parameter's schema, with what its references lead to; `kinds` are the only types, if
        any."""
        others = self.arguments_schema.get(ADDITIONAL, True)
        schema = schema_properties(self.arguments_schema).get(parameter, others)
        return self._bundler.bundle({"allOf": [{"type": [*kinds]}, schema]} if kinds else schema)

    @cached_property
    def _bundler(self) -> SchemaBundler:
        return SchemaBundler(self.arguments_schema)


def schema_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def check_separable(schema: Mapping[str, Any], num_parameters: int, num_required: int) -> None:
    """Raise ValueError for a keyword that a grammar of one parameter after another cannot keep.

    num_parameters: number of parameters
    num_required: number of required ones among them
    """
    rest = dict(schema)
    remove_ineffective_keywords(rest)
    numbers = {name: rest[name] for name in ("minProperties", "maxProperties") if is_number(rest.get(name))}
    unsupported = [name for name in WHOLE_KEYWORDS if name in rest]
    unsupported += ["minProperties"] if numbers.get("minProperties", 0) > num_required else []
    unsupported += ["maxProperties"] if numbers.get("maxProperties", num_parameters) < num_parameters else []
    unsupported += ["patternProperties"] if num_parameters and "patternProperties" in rest else []
    if unsupported:
        raise ValueError(
            f"{', '.join(unsupported)} of all parameters together: this model's notation writes each by "
            "itself, so that a grammar keeps properties and required alone"
        )


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    body_tools: as in a body of OpenAI's, for chat templates
    choice: whether tools may not, may, or must be called
    forced_name: the one tool that must be called
    allowed_names: names of the tools that may be called; None: all
    allows_parallel_calls: whether there may be several calls
    """

    body_tools: Sequence[Mapping[str, Any]]
    choice: ToolChoice = "auto"
    forced_name: str | None = None
    allows_parallel_calls: bool = True
    allowed_names: frozenset[str] | None = None

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        functions = [tool["function"] for tool in self.body_tools] if self.choice != "none" else []
        all_tools = (Tool(function["name"], function.get("parameters") or {}) for function in functions)
        allowed_tools = (
            tool for tool in all_tools if self.allowed_names is None or tool.name in self.allowed_names
        )
        return tuple(tool for tool in allowed_tools if self.forced_name in (None, tool.name))


# ---------------------------------------------------------------- values written as text, by their schema


def text_to_json(text: str, values: AllowedValues) -> str:
    """Return a parameter's text as JSON.

    A string is taken as it is; other types are read as JSON or Python writes them. A text that is a string
    and a value of another allowed type becomes the other type, unless the schema lists the string and not the
    other value. A text of no allowed type becomes a string.
    """
    json_text = JSON_WORDS.get(text.strip().lower(), text.strip())
    kind, key = value_kind_and_key(json_text)
    if (
        kind is None
        and {"array", "object"} & values.keys()
        and (value := python_to_json(json_text)) is not None
    ):
        json_text, (kind, key) = value, value_kind_and_key(value)
    is_listed = text in (values.get("string") or ())
    if allows_value(values, kind, key) and not (is_listed and values[kind or ""] is None):
        return json_text
    return quote_json(text) if allows_value(values, "string", text) or kind not in values else json_text


def value_kind_and_key(text: str) -> tuple[str | None, str]:
    """Return the type of a JSON value other than a string, and its key; no type for other text."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
        return (None, "") if isinstance(value, str) else (value_kind(value), literal_key(value))
    except (ValueError, RecursionError, OverflowError):
        return None, ""
