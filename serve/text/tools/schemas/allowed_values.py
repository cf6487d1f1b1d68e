"""Values that a schema may allow, by type, through `anyOf`, `oneOf`, `allOf` and references."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from .exact_schema import remove_ineffective_keywords
from .json_schema import UNKNOWN_REFERENCE, has_reference, resolve_reference

KIND_BY_TYPE = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
Literals = dict[str, Any]  # values by their JSON text
AllowedValues = Mapping[str, Literals | None]  # by type: its only values, or None for any value of the type
FINITE_KINDS: dict[str, Literals] = {"null": {"null": None}, "boolean": {"true": True, "false": False}}
ANY_VALUE: AllowedValues = dict.fromkeys(("string", "number", "integer", "array", "object")) | FINITE_KINDS
UNION_KEYWORDS = ("anyOf", "oneOf")
UNRESOLVED_KEYWORDS = ("not", "if", "$dynamicRef", "$recursiveRef")  # of literals, may refuse any
LIST_KEYWORDS = (*UNION_KEYWORDS, "allOf", "enum", "type")
NODE_STEPS = 10  # a schema takes as long as that many literals
STEP_CHARACTERS = 16  # of a reference, which take as long as a literal
MAX_STEPS = 50_000  # for one tool: about 50 ms


@dataclass
class ValueResolver:
    """Resolves the schemas of one document. A schema is visited once, however many references lead to it.

    root: the document, in which references begin
    """

    root: Mapping[str, Any]
    _steps: int = 0
    # By identity; None: no restriction.
    _results: dict[int, AllowedValues | None] = field(default_factory=dict)
    _targets: dict[str, Any] = field(default_factory=dict)  # by reference; None: unknown

    def resolve(self, schema: Any) -> AllowedValues:
        """Return the values that a schema may allow; a schema inside itself adds nothing. Raises ValueError
        after MAX_STEPS."""
        stack, path, starts = [(schema, False)], list[Any](), dict[int, int]()  # loops by Tarjan's algorithm
        while stack:
            node, is_visited = stack.pop()
            if is_visited:
                keys = map(id, (node, *self._subschemas(node)))
                start = starts[id(node)] = min(starts[key] for key in keys if key not in self._results)
                if path[start] is node:
                    self._resolve_loop(path[start:])
                    del path[start:]
            elif id(node) not in self._results and id(node) not in starts:
                self._count_steps(
                    NODE_STEPS + sum(len(keyword_items(node, name) or ()) for name in LIST_KEYWORDS)
                )
                starts[id(node)] = len(path)
                path.append(node)
                stack += [(node, True), *((part, False) for part in self._subschemas(node))]
        result = self._results[id(schema)]
        return ANY_VALUE if result is None else result

    def check_literals(self, schema: Any) -> None:
        """Raise ValueError naming a keyword that may refuse literals which `resolve` returns. Patterns,
        formats, lengths and bounds are not checked."""
        self.resolve(schema)
        for part in self._iterate_schemas(schema):
            rest = dict(part)
            remove_ineffective_keywords(rest)
            unsupported = [name for name in UNRESOLVED_KEYWORDS if name in rest]
            unsupported += ["oneOf"] if self._has_overlap(keyword_items(rest, "oneOf") or ()) else []
            if unsupported:
                raise ValueError(
                    f"{', '.join(unsupported)} of a value that this model's notation does not write as JSON"
                )
            if has_reference(rest) and self._targets[rest["$ref"]] is None:
                raise ValueError(UNKNOWN_REFERENCE.format(rest["$ref"]))

    def _iterate_schemas(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the objects among the schemas of the same value, each once."""
        stack, seen = [schema], set[int]()
        while stack:
            part = stack.pop()
            if isinstance(part, Mapping) and id(part) not in seen:
                seen.add(id(part))
                yield part
                stack += self._subschemas(part)

    def _has_overlap(self, options: Sequence[Any]) -> bool:
        """Return whether several schemas may allow the same string, and one of them any string."""
        results = [self._results[id(option)] for option in options]
        known = [ANY_VALUE if values is None else values for values in results]
        strings = [values["string"] for values in known if "string" in values]
        return len(strings) > 1 and None in strings

    def _resolve_loop(self, loop: Sequence[Any]) -> None:
        """Store the values of schemas that lead to each other, or of one schema alone. In a loop each schema
        gets the values of all schemas, less the values that its other keywords refuse."""
        loop_values = self._unite([self._combine(schema) for schema in loop])
        self._results |= dict.fromkeys(map(id, loop), loop_values)
        if len(loop) > 1:
            self._results |= {id(schema): self._combine(schema) for schema in loop}

    def _count_steps(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ValueError(f"more than {MAX_STEPS // NODE_STEPS} schemas, or {MAX_STEPS} literals")

    def _subschemas(self, schema: Any) -> list[Any]:
        """Return the schemas that describe the value of `schema` too: its unions, `allOf` and reference."""
        parts = [part for name in (*UNION_KEYWORDS, "allOf") for part in keyword_items(schema, name) or ()]
        return [*parts, self._target(schema)] if has_reference(schema) else parts

    def _target(self, schema: Mapping[str, Any]) -> Any:
        reference = schema["$ref"]
        if reference not in self._targets:
            self._count_steps(len(reference) // STEP_CHARACTERS)
            self._targets[reference] = resolve_reference(self.root, reference)
        target = self._targets[reference]
        return True if target is None else target

    def _combine(self, schema: Any) -> AllowedValues | None:
        """Return the values of a schema from the values of its parts; None if it depends on parts
        alone that are not yet known."""
        if not isinstance(schema, Mapping):
            return {} if schema is False else ANY_VALUE
        if schema.get("not") in (True, {}):
            return {}
        together = [values for values in (type_values(schema), literal_values(schema)) if values is not None]
        together += [self._results.get(id(part)) for part in keyword_items(schema, "allOf") or ()]
        if has_reference(schema):
            together.append(self._results.get(id(self._target(schema))))
        for name in UNION_KEYWORDS:
            if (options := keyword_items(schema, name)) is not None:
                results = [self._results.get(id(option)) for option in options]
                together.append(self._unite(results) if name == "anyOf" else self._unite_exclusive(results))
        known = self._select_known(together)
        return reduce(intersect_values, known) if known else None if together else ANY_VALUE

    def _unite(self, several: Iterable[AllowedValues | None]) -> AllowedValues | None:
        """Return the values that any of several schemas allows; None if the values of all are unknown."""
        known = self._select_known(several)
        return unite_values(known) if known else None

    def _unite_exclusive(self, several: Iterable[AllowedValues | None]) -> AllowedValues | None:
        """Return the values that exactly one of several schemas allows; None if the values of all are
        unknown."""
        known = [values for values in several if values is not None]
        self._count_literals(known)
        return unite_exclusive_values(known) if known else None

    def _select_known(self, several: Iterable[AllowedValues | None]) -> list[AllowedValues]:
        """Return the known ones of several values, each object once, and count the steps to combine them."""
        known = [*{id(values): values for values in several if values is not None}.values()]
        self._count_literals(known)
        return known

    def _count_literals(self, several: Sequence[AllowedValues]) -> None:
        """Count the steps to combine several values."""
        if len(several) > 1:
            self._count_steps(sum(len(literals or ()) for values in several for literals in values.values()))


def keyword_items(schema: Any, name: str) -> Sequence[Any] | None:
    """Return the list that is the value of a schema's key, if it is one."""
    items = schema.get(name) if isinstance(schema, Mapping) else None
    return items if isinstance(items, list) else None


def type_values(schema: Mapping[str, Any]) -> AllowedValues | None:
    """Return the values of a schema's types; None if it names none. Integers are numbers too."""
    kinds = schema.get("type")
    if not isinstance(kinds, str | list):
        return None
    names = [kinds] if isinstance(kinds, str) else [*map(str, kinds)]
    return {name: FINITE_KINDS.get(name) for name in ([*names, "integer"] if "number" in names else names)}


def literal_values(schema: Mapping[str, Any]) -> AllowedValues | None:
    """Return the values of `enum` and `const`; None without both."""
    lists = [keyword_items(schema, "enum"), [schema["const"]] if "const" in schema else None]
    known = [group_literals(items) for items in lists if items is not None]
    return reduce(intersect_values, known) if known else None


def group_literals(values: Iterable[Any]) -> AllowedValues:
    groups: dict[str, Literals] = {}
    for value in values:
        groups.setdefault(value_kind(value), {})[literal_key(value)] = value
    return groups


def value_kind(value: Any) -> str:
    """Return the type of a value of JSON; 1.0 is an integer."""
    if value is None:
        return "null"
    return (
        "integer"
        if isinstance(value, float) and value.is_integer()
        else KIND_BY_TYPE.get(type(value), "string")
    )


def literal_key(value: Any) -> str:
    """Return the key of a value of JSON, as text; equal values have equal keys."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if isinstance(whole, str) else json.dumps(whole, sort_keys=True)


def unite_values(several: Sequence[AllowedValues]) -> AllowedValues:
    """Return the values that any of several schemas allows. `several` has at least one schema."""
    if len(several) == 1:
        return several[0]
    union: dict[str, Literals | None] = {}
    for kind in dict.fromkeys(kind for values in several for kind in values):
        groups = [values[kind] for values in several if kind in values]
        some = [group for group in groups if group is not None]
        union[kind] = {k: v for group in some for k, v in group.items()} if len(some) == len(groups) else None
    return union


def unite_exclusive_values(several: Sequence[AllowedValues]) -> AllowedValues:
    """Return the values that exactly one of several schemas allows. If a schema allows any value of a type,
    all values of the type are returned. `several` has at least one schema."""
    keys = ((kind, key) for values in several for kind, literals in values.items() for key in literals or ())
    counts, union = Counter(keys), dict[str, Literals | None]()
    for kind, literals in unite_values(several).items():
        exclusive = literals and {k: v for k, v in literals.items() if counts[kind, k] == 1}
        if literals is None or exclusive:
            union[kind] = exclusive
    return union


def intersect_values(first: AllowedValues, second: AllowedValues) -> AllowedValues:
    """Return the values that both of two schemas allow."""
    common: dict[str, Literals | None] = {}
    for kind in (kind for kind in first if kind in second):
        first_literals, second_literals = first[kind], second[kind]
        if first_literals is None or second_literals is None:
            common[kind] = second_literals if first_literals is None else first_literals
        elif both := {k: v for k, v in first_literals.items() if k in second_literals}:
            common[kind] = both
    return common


def allows_value(values: AllowedValues, kind: str | None, key: str) -> bool:
    """Return whether a value of a type, known by its key, is allowed."""
    if kind is None or kind not in values:
        return False
    literals = values[kind]
    return literals is None or key in literals
