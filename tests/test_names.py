"""Names and docstrings of the library are the field's words: a verb and its object for what acts, a noun for
a value, and one name for one thing."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ["model", "kvcache", "sampling", "checkpoints", "serve", "src"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PARTICIPLE = re.compile(
    r"(?!need|feed|seed|speed|embed|shed|exceed|proceed)[a-z]*[a-z]{2}ed|drawn|taken|made|kept|sent|held|found|given|grown|"
    r"known|shown|stepped|written|begun|gone|lost|left|met|done|seen|told|woken|said|built|bound|brought|bought|"
    r"caught|chosen|forgotten|fed|felt|frozen|hidden|hung|laid|led|paid|risen|sold|shut|spoken|spent|stood|stuck|"
    r"taught|torn|thought|thrown|understood|worn|won|wound"
)
PREPOSITION = re.compile(
    r"in|on|of|by|at|to|from|with|beside|beyond|within|without|through|around|apart|until|since|between|among|after|"
    r"before|behind|above|below|under|over|into|out|off|up|down|aside|away|ahead|together|either|only|both|all|any|"
    r"none|every|each|other|another|whose|who|what|where|when|here|there|now|later|long|whole|own"
)
PREDICATE = re.compile(
    r"_*(is|has|can|needs?|should|may|must|does|did|was|are|use[sd]?|allows?|supports?|fits|matches|contains|equal|"
    r"same|exists|__)"
)
CONSTANT = re.compile(
    r"MOST|LEAST|LONG|LONGEST|FEWEST|MANY|OWN|ALL|END|PAUSE|TRIES|LARGE|SMALL|WIDE|FOUND|GIVEN"
)
LOCAL = re.compile(r"found|own|given|most|made|each")
RIDDLE = re.compile(
    r"^(the same|such|those|that)\b|\bthat of\b|\bthose (that|of)\b|\bsays? nothing\b", re.IGNORECASE
)
# Names that others dictate, and pure facts of a record: each with its reason.
PARTICIPLES = {
    "generated": "tokens of a request, a field of the processors that users write",
    "replayed": "public method of SamplingParams",
    "shared": "key of a recorded workload",
    "accepted": "public method of an output's pass",
    "finished": "vLLM's name, of CompletionOutput",
}
SHARED = {
    "__getattr__": "Python's hook of modules",
    "add_flags": "hook of a subcommand",
    "run": "hook of a subcommand",
    "main": "entry of a script",
}
# Methods that act and return whether they could, as `dict.pop` returns what it took; the rest is public.
ACTIONS = {
    "cache_page",
    "grow",
    "advance_warmup_if_idle",
    "_grow_pages_or_preempt",
    "step_and_deliver",
    "_charge_trial",
    "_end_oldest",
    "run_orders",
    "_fill_engine",
    "_reserve_staging",
    "advance",
    "warm_up_idle_session",
    "warm_up_once",
    "reset_prefix_cache",
    "_play_entries",
    "step",
    "_take_over",
    "restart_answer",
    "_give_up",
    "_forward",
}
PUBLIC_FLAGS = {"flag", "greedy", "finished"}
# Fields whose names a file format, a wire format or a paper has.
FIELDS = {
    "scale",
    "weight",
    "scales",
    "blocks",
    "qweight",
    "qzeros",
    "leaves",
    "target",
    "experts",
    "router",
    "shared",
    "experts_post",
    "shared_post",
    "ttft",
    "tpot",
    "e2e",
    "work",
    "phases",
    "message",
    "error",
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Return the syntax of each file of the library."""
    listing = subprocess.run(
        ["git", "ls-files", "--", *LIBRARY], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    names = [x for x in listing.stdout.splitlines() if x.endswith(".py") and not (ROOT / x).is_symlink()]
    return {name: ast.parse((ROOT / name).read_text()) for name in names}


def functions(trees: dict[str, ast.Module]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function of the library with its file and line."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield f"{file}:{node.lineno} {node.name}", node


def test_functions_are_no_participles(trees):
    names = [(where, node.name.strip("_")) for where, node in functions(trees)]
    assert [where for where, name in names if PARTICIPLE.fullmatch(name) and name not in PARTICIPLES] == []


def test_functions_are_no_prepositions_or_pronouns(trees):
    assert [where for where, node in functions(trees) if PREPOSITION.fullmatch(node.name.strip("_"))] == []


def test_a_function_name_has_one_module(trees):
    modules = defaultdict[str, list[str]](list)
    for file, tree in trees.items():
        for node in tree.body if "families" not in file else ():  # families have hooks of the same names
            if isinstance(node, FUNCTIONS):
                modules[node.name].append(file)
    assert {
        name: files for name, files in modules.items() if len(set(files)) > 1 and name not in SHARED
    } == {}


def test_constants_are_nouns_with_a_unit_or_a_bound(trees):
    targets = [
        (file, x)
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for x in node.targets
    ]
    assert [(file, x.id) for file, x in targets if isinstance(x, ast.Name) and CONSTANT.fullmatch(x.id)] == []


def test_locals_say_what_they_hold(trees):
    targets = [
        (file, name)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
    ]
    names = [(f"{file}:{x.lineno} {x.id}", x) for file, x in targets if isinstance(x, ast.Name)]
    assert [where for where, x in names if isinstance(x.ctx, ast.Store) and LOCAL.fullmatch(x.id)] == []


def test_functions_that_return_bool_are_predicates(trees):
    allowed = ACTIONS | PUBLIC_FLAGS
    assert [
        where
        for where, node in functions(trees)
        if isinstance(node.returns, ast.Name) and node.returns.id == "bool"
        if not PREDICATE.match(node.name) and node.name not in allowed
    ] == []


def test_fields_and_parameters_are_named_after_their_class(trees):
    classes = {n.name for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    assert [
        f"{where} {name}: {annotation.id}"
        for where, name, annotation in annotated_names(trees)
        if isinstance(annotation, ast.Name) and annotation.id in classes and len(name) > 2
        if name not in FIELDS | {"self", "cls", "params", "config"}
        if not words(name) & words(annotation.id)
    ] == []


def annotated_names(trees: dict[str, ast.Module]) -> Iterator[tuple[str, str, ast.expr | None]]:
    """Yield each parameter and annotated variable: file and line, name, annotation."""
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                yield f"{file}:{node.lineno}", node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield f"{file}:{node.lineno}", node.target.id, node.annotation


def words(name: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, in the singular."""
    return {word.lower().rstrip("s") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_docstrings_are_true_when_read_alone(trees):
    assert [
        where
        for where, node in functions(trees)
        if RIDDLE.search((ast.get_docstring(node) or "").partition("\n\n")[0])
    ] == []
