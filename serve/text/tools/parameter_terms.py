"""Terms of a grammar for single parameters, and names that can be written."""

from collections.abc import Callable, Iterable, Mapping

from .lark import Lark
from .tool import Tool


def value_terms(tool: Tool, key: str, lark: Lark, end: str) -> list[str] | None:
    """Return terms for a parameter between tags: the strings that its schema lists, and JSON of its other
    types. Returns None if any string is allowed. Raises ValueError for a listed string with the text `end`,
    which ends a value."""
    values = tool.allowed_values(key)
    if "string" in values:
        tool.check_literals(key)
        if values["string"] is None:
            return None
    strings = values.get("string") or ()
    if unwritable := [string for string in strings if end.strip() in string]:
        raise ValueError(
            f"a constant {unwritable[0]!r:.100}: in this model's notation {end.strip()} ends a value"
        )
    texts = [lark.text_terms(text) for text in strings]
    others = [kind for kind in values if kind != "string"]
    if texts and not others:
        return texts
    return [*texts, lark.json_term(tool.grammar_schema(key, others if texts else ()))]


def python_arguments_term(tool: Tool, words: Mapping[str, str], lark: Lark) -> str:
    """Return a term for the arguments of a call in Python, in their order. An argument that is not required
    may be missing."""
    names, is_required = [*tool.grammar_parameters], tool.grammar_parameters
    items = [
        lark.add_rule(f"{lark.text_terms(f'{name}=')} {python_parameter_term(tool, name, words, lark)}")
        for name in names
    ]
    tails, firsts = [""], list[str]()
    for name, item in zip(reversed(names), reversed(items), strict=True):
        next_one = f'", " {item}' if is_required[name] else f'(", " {item})?'
        tails.append(lark.add_rule(f"{next_one} {tails[-1]}"))
    for i, name in enumerate(names):
        firsts.append(f"{items[i]} {tails[len(names) - 1 - i]}")
        if is_required[name]:
            break
    else:
        firsts.append('""')
    return lark.add_alternatives(firsts)


def python_parameter_term(tool: Tool, name: str, words: Mapping[str, str], lark: Lark) -> str:
    """Return a term for a parameter as Python writes it, with other `words` for JSON's if it has no other
    values."""
    values = tool.allowed_values(name)
    if words and values and {"boolean", "null"}.issuperset(values):
        tool.check_literals(name)
        listed = [word for literals in values.values() for word in literals or ()]
        return lark.add_alternatives(lark.text_terms(words[word]) for word in listed)
    return lark.json_term(tool.grammar_schema(name))


def check_parameter_names(names: Iterable[str], is_readable: Callable[[str], bool]) -> None:
    """Raise ValueError for a parameter whose name a notation of calls cannot write."""
    for name in names:
        if not name or not is_readable(name):
            raise ValueError(f"a parameter named {name!r}: this model's notation of calls cannot write it")
