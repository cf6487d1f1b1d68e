"""The library's docstrings and comments are plain technical English, as far as a machine can tell."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["model", "kvcache", "sampling", "checkpoints", "src/duetto"]
ROOMS += sorted(
    f"serve/{folder.name}" for folder in (ROOT / "serve").iterdir() if (folder / "__init__.py").exists()
)
# A docstring begins with a verb or a noun: "Return the number of pages", not "How many pages".
OPENINGS = re.compile(r"(what|whether|of|those|that|one|who|whom|whose|whoever|how)\b", re.IGNORECASE)
# Components, not persons; numbers have names.
PERSONS = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anybody|everybody|someone|anyone|so many)\b", re.IGNORECASE
)


def files(room: str) -> list[Path]:
    return [file for file in sorted((ROOT / room).rglob("*.py"), key=str) if not file.is_symlink()]


@cache  # rooms lead to the same files
def docstrings(file: Path) -> list[tuple[int, str]]:
    """Return each docstring of a file with its line."""
    return [
        (node.body[0].lineno, text)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]


@cache
def comments(file: Path) -> list[tuple[int, str]]:
    """Return each comment of a file with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def line(file: Path, number: int, text: str) -> str:
    return f"{file.relative_to(ROOT)}:{number}: {text.splitlines()[0]}"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb_or_a_noun(room):
    found = [
        line(file, number, text)
        for file in files(room)
        for number, text in docstrings(file.resolve())
        if OPENINGS.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_prose_speaks_of_components_and_named_numbers(room):
    found = [
        line(file, number, text)
        for file in files(room)
        for number, text in [*docstrings(file.resolve()), *comments(file.resolve())]
        if PERSONS.search(text)
    ]
    assert not found, "\n".join(found)
