"""Schemas changed so that llguidance's grammars allow no value that the schema refuses."""

import math
import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

from ...tokenizer.chats.messages import iterate_scalars, iterate_strings
from .json_schema import (
    ADDITIONAL,
    DEFINITION_KEYWORDS,
    ITEM_KEYWORDS,
    PROPERTY_KEYWORDS,
    Schema,
    has_keyword,
    iterate_schemas,
)

# Formats that llguidance knows. By JSON Schema an unknown format has no effect.
KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
# Keywords that a grammar may not keep, with their values that have no effect.
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "patternProperties": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
# Keywords that have no effect without one of some others.
COMPANIONS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "$dynamicAnchor": ("$dynamicRef",),
}
# Keywords that refuse no string, whatever their values are.
NO_STRING_EFFECT = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("$schema", "$id", "$anchor", "required", "contains"),
        *(*DEFINITION_KEYWORDS, *PROPERTY_KEYWORDS, ADDITIONAL, *ITEM_KEYWORDS),
        *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "propertyNames"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
ALL_STRINGS = re.compile(r"\^?(\.\*)?")  # patterns that match any string
COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_EXACT_INTEGER = 1 << 53  # integers up to it are numbers of float64, in which llguidance compares
MAX_INTEGER = 1 << 63  # llguidance writes larger constants with the digits that tell float64s apart
MAX_DIGITS = 15  # of a decimal that serde_json, which llguidance uses, reads as Python does
MAX_BOUND = 10**300  # beyond it llguidance refuses a bound
# The number next to 0: each digit behind the point costs the grammar one more state.
SMALLEST_BOUND = Decimal("1e-30")
SHORT_ESCAPES = 'nrbtf\\"'


def adapt_schema(schema: Schema) -> dict[str, Any]:
    """Change a schema in place, so that its grammar allows no value that the schema refuses. Return
    llguidance's options for it. Raises ValueError naming a keyword that no grammar can keep."""
    schemas = [*iterate_schemas(schema)]
    options = {"json_allowed_escapes": SHORT_ESCAPES} if any(map(may_repeat_names, schemas)) else {}
    for part in schemas:
        if options:
            check_control_characters(part)
        remove_ineffective_keywords(part)
        for name in COUNT_KEYWORDS:
            if isinstance(part.get(name), float) and part[name].is_integer():
                part[name] = int(part[name])
        tighten_bound(part, "minimum", "exclusiveMinimum", ROUND_CEILING)
        tighten_bound(part, "maximum", "exclusiveMaximum", ROUND_FLOOR)
        check_constant_integers(part)
        check_min_properties(part)
        rewrite_patterns(part)
    return options


def remove_ineffective_keywords(schema: Schema) -> None:
    """Remove keywords that refuse no value."""
    ineffective = [name for name, values in NO_EFFECT.items() if name in schema and schema[name] in values]
    ineffective += [name for name, others in COMPANIONS.items() if not has_keyword(schema, others)]
    if isinstance(schema.get("format"), str) and schema["format"] not in KNOWN_FORMATS:
        ineffective.append("format")
    if allows_any_string(schema.get("propertyNames")):
        ineffective.append("propertyNames")
    for name in ineffective:
        schema.pop(name, None)


def allows_any_string(schema: Any) -> bool:
    """Return whether a schema certainly refuses no string."""
    return (
        schema is True
        or isinstance(schema, Mapping)
        and all(has_no_string_effect(name, value) for name, value in schema.items())
    )


def has_no_string_effect(name: str, value: Any) -> bool:
    """Return whether a keyword with a value certainly refuses no string."""
    if name == "type":
        return value == "string" or isinstance(value, list) and "string" in value
    if name == "pattern":
        return isinstance(value, str) and ALL_STRINGS.fullmatch(value) is not None
    if name == "format":
        return not isinstance(value, str) or value not in KNOWN_FORMATS
    return name in NO_STRING_EFFECT or (name, value) in (("minLength", 0), ("not", False))


def may_repeat_names(schema: Schema) -> bool:
    """Return whether an object's grammar may repeat a named property as another one, by escapes in its
    name."""
    return has_keyword(schema, PROPERTY_KEYWORDS) and (
        schema.get(ADDITIONAL) is not False or all(name in schema for name in PROPERTY_KEYWORDS)
    )


# ---------------------------------------------------------------- numbers


def tighten_bound(schema: Schema, name: str, open_name: str, rounding: str) -> None:
    """Replace both kinds of a bound by one that llguidance keeps."""
    bound, open_bound = schema.get(name), schema.get(open_name)
    if open_bound is True:  # draft 4
        open_bound = bound
    sign = 1 if rounding == ROUND_CEILING else -1
    pairs = ((bound, False), (open_bound, True))
    bounds = [round_bound(value, rounding, is_open) for value, is_open in pairs if is_number(value)]
    if bounds:
        number, is_open = max(bounds, key=lambda candidate: (sign * candidate[0], candidate[1]))
        schema.pop(open_name, None)
        schema.pop(name, None)
        schema[open_name if is_open else name] = number


def is_number(value: Any) -> TypeGuard[float]:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= MAX_BOUND


def round_bound(bound: float, rounding: str, is_open: bool) -> tuple[float, bool]:
    """Return the nearest number inside of a bound that llguidance reads exactly, and whether it is open.

    It is a decimal of MAX_DIGITS digits, or a large integer that float64 has. Inside is up for ROUND_CEILING,
    and down for ROUND_FLOOR. Of two bounds with the same integer part llguidance's grammars allow the open
    one that is nearer to 0: it gets another digit.
    """
    sign = 1 if rounding == ROUND_CEILING else -1
    number = Decimal(bound if isinstance(bound, int) else repr(bound))
    if abs(number) >= 10 ** (MAX_DIGITS - 1):
        return round_large_bound(number, rounding, is_open), False
    context = Context(prec=MAX_DIGITS, rounding=rounding)
    inside = context.plus(number)
    is_open = is_open and inside == number
    if is_open and sign * number >= 0:
        next_one = context.next_plus(number) if sign > 0 else context.next_minus(number)
        inside, is_open = next_one if number else sign * SMALLEST_BOUND, False
    return int(inside) if inside == int(inside) else float(inside), is_open


def round_large_bound(number: Decimal, rounding: str, is_open: bool) -> int:
    """Return the nearest integer of float64 inside of a bound, up or down."""
    sign = 1 if rounding == ROUND_CEILING else -1
    whole = int(number.to_integral_value(rounding))
    whole += sign * (is_open and whole == number)
    near = float(whole)
    return int(near if sign * near >= sign * whole else math.nextafter(near, sign * math.inf))


def check_constant_integers(schema: Schema) -> None:
    """Raise ValueError for a constant integer that llguidance would change."""
    for name in ("const", "enum"):
        for number in iterate_scalars(schema.get(name)):
            if (
                type(number) is int
                and abs(number) > MAX_EXACT_INTEGER
                and number != round_as_llguidance(number)
            ):
                raise ValueError(f"{name} has {number}: beyond 2**53 only integers that float64 has")


def round_as_llguidance(number: int) -> int:
    """Return the integer that llguidance writes for a constant."""
    if abs(number) > MAX_BOUND:
        return 0
    whole = int(float(number))
    if abs(whole) < MAX_INTEGER:
        return whole
    digits, _, exponent = repr(float(number)).partition("e+")
    before, _, after = digits.partition(".")
    after = after.rstrip("0")
    return int(before + after) * 10 ** (int(exponent or 0) - len(after))


# ---------------------------------------------------------------- objects and strings


def check_min_properties(schema: Schema) -> None:
    """Raise ValueError for a number of properties that a grammar cannot count: it does not know whether two
    keys are alike."""
    min_properties, required = schema.get("minProperties"), schema.get("required")
    known = len({*map(str, required)}) if isinstance(required, list) else 0
    if not isinstance(min_properties, int) or min_properties <= known + 1:
        return
    if schema.get(ADDITIONAL) is not False or schema.get("patternProperties"):
        raise ValueError(f"minProperties={min_properties}: at most {known + 1}, one more than are required")


# A class of characters without its bracket, an escape, or a dot; a class that does not end goes to the end.
PATTERN_TOKEN = re.compile(r"(?s)\\[pP](?:\{[^{}]*\}|.)|\\.|\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]?|\.")
CLASS_PART = re.compile(r"(?s)\\.|\[:\^?[a-z]+:\]|--|[\[&~]")  # of a class
ECMA_SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# Classes as JSON Schema reads them.
ECMA_CLASSES = {r"\s": f"[{ECMA_SPACES}]", r"\S": f"[^{ECMA_SPACES}]", ".": r"[^\n\r\u2028\u2029]"}


CONTROL_PATTERN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without a short escape in JSON
WRITTEN_CONTROL_PATTERN = re.compile(
    rf"{CONTROL_PATTERN.pattern}|\\[va]|\\x(?:[01]|7[fF]|\{{)|\\u(?:00(?:[01]|7[fF])|\{{)"
)


def check_control_characters(schema: Schema) -> None:
    """Raise ValueError for a text with a control character: without long escapes llguidance leaves it out."""
    table = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(table if isinstance(table, dict) else ())]
    literals = (literal for name in ("const", "enum") for literal in iterate_strings(schema.get(name)))
    written = any(
        WRITTEN_CONTROL_PATTERN.search(PATTERN_TOKEN.sub(drop_class, pattern))
        for pattern in patterns
        if isinstance(pattern, str)
    )
    if written or any(map(CONTROL_PATTERN.search, literals)):
        raise ValueError(
            "a control character in const, enum or a pattern, beside objects that name properties and allow "
            "others"
        )


def drop_class(match: re.Match[str]) -> str:
    """Return a token of a pattern; nothing for a class of several characters."""
    return "" if match[0][0] == "[" and {"-", "^"}.intersection(match[0]) else match[0]


def rewrite_patterns(schema: Schema) -> None:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = rewrite_pattern(pattern)
    if isinstance(table := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {rewrite_pattern(name): value for name, value in table.items()}


def rewrite_pattern(pattern: str) -> str:
    """Return a pattern of ECMA-262 as llguidance's library reads it (Rust's).

    Classes of characters lose U+0006: to a class with all control characters llguidance adds the escapes of
    `"` and the backslash.
    """
    return PATTERN_TOKEN.sub(rewrite_pattern_token, pattern)


def rewrite_pattern_token(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == "[":
        start = 2 if token[1:2] == "^" else 1
        return f"[{token[:start]}{CLASS_PART.sub(rewrite_class_part, token[start:])}&&[^\\x06]]"
    if token[:2] in (r"\p", r"\P"):
        return f"[{token}&&[^\\x06]]"
    return ECMA_CLASSES.get(token, token)


def rewrite_class_part(match: re.Match[str]) -> str:
    """Return a part of a class without Rust's sets of classes."""
    part = match[0]
    if part == "--":
        return r"-\-"
    return ECMA_CLASSES.get(part, part) if len(part) > 1 else f"\\{part}"
