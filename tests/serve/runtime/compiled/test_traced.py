"""What kept programs are hashed by: the code that steps are traced from, and no other."""

import ast
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases.models import RANDOM
from suite.marks import full

import duetto
from duetto.model.draft_pair import PairConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs
from duetto.serve.host import identity
from duetto.serve.runtime.compiled.lowering import LocalLowering, make_abstract_arguments
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.steps.phases import TargetOnly

ROOT = Path(duetto.__file__).parent
TOPS = [place for name in identity.LIBRARY_MODULES for place in map(Path, identity.module_paths(name))]
# Where programs are lowered or compared, and measurements kept.
BEGINNINGS = (
    "serve.engine.speculation.draft_steps",
    "serve.engine.startup.bfloat16_gain",
    "serve.engine.startup.kernel_cases",
    "serve.engine.startup.kernel_checks",
    "serve.runtime.compiled.local_executor",
    "serve.runtime.compiled.transfers",
    "serve.runtime.equal_bits.warmup",
    "serve.runtime.pipeline.lowering",
)
# What these say reaches a program by its key and its arguments alone: no step is traced from them.
BESIDE = ("serve.host", "serve.options", "refusals", "option_fields", "neutral_values", "user_folders")
APART = ("cli", "server", "jobs", "llm", "text", "planner")  # whose edits compile nothing anew


def file_of(module: str) -> Path | None:
    """The file of a module of the library, below `duetto`."""
    place = ROOT / module.replace(".", "/")
    files = place.with_suffix(".py"), place / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def module_of(file: Path) -> str | None:
    """The module of the library that a file is; None for others."""
    place = next((top for top in TOPS if file.is_relative_to(top)), None)
    return None if place is None else ".".join(file.relative_to(place.parent).with_suffix("").parts)


def imports(module: str) -> set[str]:
    """The modules of the library that one imports, wherever in its text."""
    file = file_of(module)
    assert file is not None
    package = ["duetto", *module.split(".")][: None if file.name == "__init__.py" else -1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {name if file_of(name.removeprefix("duetto.")) else base for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("duetto.") for name in found if name.startswith("duetto.")}


def reached() -> set[str]:
    """All modules that the beginnings import, and those that these import."""
    found, left = set[str](), [*BEGINNINGS]
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            left += imports(module)
    return found


def within(module: str, names: tuple[str, ...]) -> str | None:
    """The name that is a module or a package around it."""
    return next((name for name in names if f"{module}.".startswith(f"{name}.")), None)


def test_the_table_is_what_the_import_graph_of_steps_says():
    found = {
        module: within(module, identity.TRACED_MODULES) for module in reached() if not within(module, BESIDE)
    }
    assert [module for module, entry in found.items() if entry is None] == []
    assert set(found.values()) == set(identity.TRACED_MODULES)


def test_no_step_reaches_what_serves_or_plans():
    apart = tuple(f"serve.{door}" for door in APART)
    assert [module for module in reached() if within(module, apart)] == []
    assert not any(within(entry, apart) for entry in identity.TRACED_MODULES)


@pytest.mark.parametrize("name", ["tiny", full("recurrent")])
def test_a_step_calls_no_other_code_while_it_is_traced(name):
    config, device = RANDOM[name], jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = shapes_from_specs(decoder_spec(config), jnp.float32, device)
    sizes = Sizes(64, 8, (16,) * len(PairConfig(config).windows), 16)
    arguments = make_abstract_arguments(PairConfig(config), params, sizes)
    called: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, *_: called.add(frame.f_code.co_filename))
    try:
        for shape in (Shape("prefill", 1, 16), Shape("decode", 8, 1)):
            LocalLowering(TargetOnly(config), arguments, sizes).lower_all(shape)
    finally:
        sys.setprofile(before)
    counter = "serve.engine.metrics.stats"  # jax calls its listener at each compilation
    modules = {module_of(Path(file)) for file in called} - {None, counter}
    assert "serve.runtime.steps.step" in modules
    assert {module for module in modules if not within(module, identity.TRACED_MODULES)} == set()


def test_edits_of_traced_code_count_and_others_do_not(tmp_path, monkeypatch):
    for name in ("step", "router"):
        (tmp_path / f"{name}.py").write_text("x = 1")
    monkeypatch.setattr(identity, "module_paths", lambda name: [tmp_path / "step.py"])
    before = identity.imported_sources_hash.__wrapped__()
    (tmp_path / "router.py").write_text("x = 2")
    assert identity.imported_sources_hash.__wrapped__() == before
    (tmp_path / "step.py").write_text("x = 2")
    assert identity.imported_sources_hash.__wrapped__() != before
