"""The library's docstrings and comments are plain technical English, as far as a machine can tell."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with its line."""
    for node in ast.walk(ast.parse(file.read_text())):
        described = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if described and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each comment of a file with its line."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def line(file: Path, number: int, text: str) -> str:
    return f"{file.relative_to(ROOT)}:{number}: {text.splitlines()[0]}"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb_or_a_noun(room):
    found = [
        line(file, number, text)
        for file in files(room)
        for number, text in docstrings(file)
        if OPENINGS.match(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_prose_speaks_of_components_and_named_numbers(room):
    found = [
        line(file, number, text)
        for file in files(room)
        for number, text in [*docstrings(file), *comments(file)]
        if PERSONS.search(text)
    ]
    assert not found, "\n".join(found)
