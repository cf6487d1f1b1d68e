"""GBNF, llama.cpp's notation of grammars, made ready for llguidance's converter to Lark.

Imports the standard library alone: it runs in the process that compiles grammars.
"""

import re
from collections.abc import Iterable
from itertools import count

# Strings, classes, counts of repetitions, comments, names, and single characters.
GBNF_TOKENS = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|\{[^}]*\}|#[^\r\n]*|[\w-]+|::=|.', re.DOTALL | re.ASCII
)
UNICODE_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
LARK_SIGNS = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
RULE_NAME = re.compile(r"[\w-]+", re.ASCII)
SURROGATES, MAX_CODE_POINTS = range(0xD800, 0xE000), 0x110000


def is_gbnf(text: str) -> bool:
    return "::=" in text and LARK_SIGNS.search(text) is None


def normalise_gbnf(text: str) -> str:
    """Return a grammar that the converter translates rightly.

    The converter cuts zeros out of `\\u` and `\\U`, and takes `.` for no line break. It renames rules until
    two have one name, or one has a name that Lark does not have.
    """
    tokens = GBNF_TOKENS.findall(text)
    names = rename_rules(list_rule_names(tokens))
    return "".join(normalise_gbnf_token(token, names) for token in tokens)


def normalise_gbnf_token(token: str, names: dict[str, str]) -> str:
    if token == ".":
        return r"(.|[\n])"
    if token.startswith('"'):
        return UNICODE_ESCAPES.sub(decode_escape, token)
    if token.startswith("["):  # && and ~~ have a meaning in classes of regular expressions
        return UNICODE_ESCAPES.sub(decode_escape, token).replace("&", r"\x26").replace("~", r"\x7e")
    return names.get(token, token)


def decode_escape(escape: re.Match[str]) -> str:
    """Return the character of an escape by its number, or the escape if there is no such character."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else MAX_CODE_POINTS
    if code >= MAX_CODE_POINTS or code in SURROGATES:
        return escape[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def list_rule_names(tokens: Iterable[str]) -> list[str]:
    names, last = [], ""
    for token in tokens:
        if token == "::=":
            names.append(last)
        elif RULE_NAME.fullmatch(token):
            last = token
    return names


def rename_rules(names: Iterable[str]) -> dict[str, str]:
    """Return other names for rules that have the Lark name of another rule, or none."""
    rules = [name for name in dict.fromkeys(names) if name not in ("", "root")]
    taken, kept = {lark_rule_name(name) for name in rules}, {"start"}
    renamed: dict[str, str] = {}
    for i, name in enumerate(rules):
        plain = lark_rule_name(name)
        if plain in kept or plain[0].isdigit():
            renamed[name] = next(new for n in count(i) if (new := f"rule_{plain}_{n}") not in taken)
            taken.add(renamed[name])
        kept.add(plain)
    return renamed


def lark_rule_name(name: str) -> str:
    """Return the name that the converter gives to a rule, in lower case."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
