"""JSON text without halves of surrogate pairs, escaped or not: no UTF-8 has them."""

import re

# Escapes of JSON, the first group one of a lone surrogate; then surrogates themselves, the second a lone one.
SURROGATE_PATTERN = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
    "|[\ud800-\udbff][\udc00-\udfff]|([\ud800-\udfff])",
    re.DOTALL,
)
OPEN_ESCAPE_PATTERN = re.compile(
    r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|\\(?:u[0-9a-fA-F]{0,3})?)$"
)


def replace_lone_surrogates(text: str) -> str:
    """Return JSON text in which surrogates, escaped or not, are pairs: U+FFFD stands for lone ones."""
    return (
        text if text.isascii() and "\\" not in text else SURROGATE_PATTERN.sub(_replace_lone_surrogate, text)
    )


def _replace_lone_surrogate(surrogate: re.Match[str]) -> str:
    escape, lone = surrogate.groups()
    if escape or lone:
        return "\\ufffd" if escape else "\N{REPLACEMENT CHARACTER}"
    return surrogate[0].encode("utf-16", "surrogatepass").decode("utf-16")


def find_open_escape(text: str) -> int:
    """Return the position in JSON text where an escape begins that more text may complete, or pair; the end
    of the text without one."""
    escape = OPEN_ESCAPE_PATTERN.search(text) if "\\" in text[-11:] else None
    return len(text) if escape is None else escape.start(1)
