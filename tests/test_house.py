"""The house: folders that show about a dozen doors, files and functions of a size to be read, classes whose
private fields are their own, and no package left out of the wheel."""

import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ("model", "kvcache", "sampling", "checkpoints", "serve")
MOST_DOORS, MOST_LINES, MOST_OF_A_FUNCTION = 13, 500, 60  # a folder's files and folders; lines
MOST_WORDS = 10  # of a test's name
# A file a family; folders that are to lose doors, and may get none.
CROWDED = {
    "checkpoints/families": 130,
    "model": 18,
    "checkpoints": 18,
    "src/duetto": 17,
    "kvcache": 15,
    "serve/llm": 15,
}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
PUBLIC = {"_asdict", "_replace", "_exit"}  # of namedtuple and os, in spite of their names


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """What the repository keeps, links aside."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listing.stdout.splitlines() if not (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def trees(files) -> dict[Path, ast.Module]:
    """What each Python file is parsed to."""
    return {file: ast.parse((ROOT / file).read_text()) for file in files if file.suffix == ".py"}


def test_a_folder_has_about_a_dozen_entries(files):
    doors = defaultdict[str, set[str]](set)
    for file in files:
        if file.parts[0] in (*LIBRARY, "src") and file.name != "__init__.py":
            for i in range(1, len(file.parts)):
                doors["/".join(file.parts[:i])].add(file.parts[i])
    assert {
        folder: len(own) for folder, own in doors.items() if len(own) > CROWDED.get(folder, MOST_DOORS)
    } == {}


def test_private_fields_of_another_class_are_not_used(trees):
    reaches = []
    for file, tree in trees.items():
        if file.parts[0] in (*LIBRARY, "src"):
            found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            own = names | {node.attr for node in found if is_own(node.value)}
            reaches += [
                f"{file}:{node.lineno}: {ast.unparse(node)}"
                for node in found
                if re.match("_[^_]", node.attr) and node.attr not in own | PUBLIC
            ]
    assert reaches == []


def is_own(value: ast.expr) -> bool:
    """Whether a value is the object or the class whose method reads it."""
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def test_files_and_functions_have_a_maximum_length(trees):
    long = []
    for file, tree in trees.items():
        long += [str(file)] if len((ROOT / file).read_text().splitlines()) > MOST_LINES else []
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{file}: {node.name}"] if lines > MOST_OF_A_FUNCTION else []
    assert long == []


def test_names_of_tests_have_at_most_ten_words(trees):
    functions = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    names = [node.name for node in functions if node.name.startswith("test_")]
    assert [name for name in names if name.count("_") > MOST_WORDS] == []


def test_every_package_is_in_the_wheel(files):
    rooms = {file.parent for file in files if file.name == "__init__.py"}
    library = {"duetto." + str(room).replace("/", ".") for room in rooms if room.parts[0] in LIBRARY}
    others = {str(room).removeprefix("src/").replace("/", ".") for room in rooms if room.parts[0] == "src"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(library | others)


def test_data_files_of_the_library_are_in_the_wheel(files):
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    kept = {
        (package.removeprefix("duetto.").replace(".", "/"), name)
        for package in data
        for name in data[package]
    }
    for file in (file for file in files if file.parts[0] in LIBRARY and file.suffix != ".py"):
        assert any(file.is_relative_to(folder) and file.match(name) for folder, name in kept), file


def test_class_names_are_unique_in_the_library(trees):
    places = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree) if file.parts[0] in (*LIBRARY, "src") else ():
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_class_overrides_a_protected_method_of_another(trees):
    """Classes share code by composition."""
    classes = {
        node.name: node
        for file, tree in trees.items()
        for node in (ast.walk(tree) if file.parts[0] in (*LIBRARY, "src") else ())
        if isinstance(node, ast.ClassDef)
    }
    assert [
        f"{name}.{method} overrides {base.name}"
        for name, node in classes.items()
        for base in ancestors(node, classes)
        for method in sorted(protected_methods(node) & protected_methods(base))
    ] == []


def ancestors(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The classes of the library that a class inherits from."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    parents = [classes[base.id] for base in bases if isinstance(base, ast.Name) and base.id in classes]
    return [*parents, *(found for parent in parents for found in ancestors(parent, classes))]


def protected_methods(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, FUNCTIONS) and re.match("_[^_]", part.name)}


def test_tests_that_share_engines_run_in_one_process(request):
    """By the group that xdist reads from the end of an id, which depends on pytest's internals."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process runs all tests")
    (mark,) = request.node.iter_markers("xdist_group")
    assert request.node.nodeid.endswith(f"@{mark.args[0]}")
