"""The house: rooms that a folder listing shows whole, files and functions of a size to be read, and no room
left out of the wheel."""

import ast
import subprocess
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("model", "kvcache", "sampling", "checkpoints", "serve")
TABLES = {"checkpoints/families", "docs"}  # a file a family, a page a subject
MOST_FILES, MOST_LINES, MOST_OF_A_FUNCTION = 16, 500, 60


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """What the repository keeps, links aside."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listing.stdout.splitlines() if not (ROOT / name).is_symlink()]


def test_a_folder_has_no_more_files_than_one_can_look_over(files):
    counts = Counter(str(file.parent) for file in files)
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES and folder not in TABLES} == {}


def test_files_and_functions_can_be_read_at_one_sitting(files):
    long = []
    for file in files:
        if file.suffix == ".py":
            text = (ROOT / file).read_text()
            long += [str(file)] if len(text.splitlines()) > MOST_LINES else []
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    long += [f"{file}: {node.name}"] if lines > MOST_OF_A_FUNCTION else []
    assert long == []


def test_every_room_is_in_the_wheel(files):
    rooms = {file.parent for file in files if file.name == "__init__.py"}
    library = {"duetto." + str(room).replace("/", ".") for room in rooms if room.parts[0] in LIBRARY}
    others = {str(room).removeprefix("src/").replace("/", ".") for room in rooms if room.parts[0] == "src"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(library | others)


def test_what_the_library_reads_beside_its_modules_is_in_the_wheel(files):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    kept = {
        (package.removeprefix("duetto.").replace(".", "/"), name)
        for package in data
        for name in data[package]
    }
    for file in (file for file in files if file.parts[0] in LIBRARY and file.suffix != ".py"):
        assert any(file.is_relative_to(folder) and file.match(name) for folder, name in kept), file


def test_no_class_name_stands_twice_in_the_library(files):
    places = defaultdict(list)
    for file in (file for file in files if file.parts[0] in (*LIBRARY, "src") and file.suffix == ".py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
