"""The notebooks are stored with outputs of their own sources, run from the first cell to the last, and open
in Colab."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notebooks.store import code_cells, digest, run

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = [
    "01-quickstart",
    "02-what-a-step-costs",
    "03-speculation",
    "04-pipelines",
    "05-planning",
    "06-exact-on-policy",
]
COLAB = "https://colab.research.google.com/github/duetto-ai/duetto/blob/main/notebooks"
MOST_BYTES = 300_000
DRIVERS = {None: "", "580.65.06": ",cuda", "550.54.15": ",cuda12", "unknown": ",cuda12"}


# Before the first cell: everything is chosen as on a T4, and runs on this CPU. The shipped model is stored in
# float32, which "auto" keeps.
AS_ON_A_T4 = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from cases.gpus import served_as
gpu = served_as("t4")
gpu.__enter__()
"""
# The engines of notebooks; 02 has steps alone, and 04, 05 and 06 ask for CPUs.
ENGINES = {"01-quickstart": "llm", "02-what-a-step-costs": None, "03-speculation": "plain"}
SHOW_CHOICES = """
print({llm}.engine.params.embed.dtype, {{x["reason"] for x in {llm}.report()["kernels"].values()}})
"""
CHOICES = "float32 {'it needs compute capability 8.0, Tesla T4 has 7.5'}"


def read(name: str):
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def shown(cell: Any) -> set[str]:
    """The kinds of a cell's outputs; what it says on standard error is none."""
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return {kind for output in outputs for kind in output.get("data", ("text",))}


def test_all_notebooks_are_listed():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_stored_with_the_outputs_of_its_sources(name):
    notebook = read(name)
    assert notebook.metadata.kernelspec.name == "python3"
    assert f"{COLAB}/{name}.ipynb" in notebook.cells[0].source
    code = code_cells(notebook)
    assert "pip install" in code[0].source and "git+https://github.com/duetto-ai/duetto" in code[0].source
    assert notebook.metadata.stored_for == digest(notebook), f"run `python notebooks/store.py {name}`"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and all(
        output.output_type != "error" and output.get("name") != "stderr" for output in outputs
    )
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("driver, extra", list(DRIVERS.items()))
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_jax_for_the_driver(name, driver, extra, monkeypatch):
    source = code_cells(read(name))[0].source.replace("%pip install --quiet ", "asked = f")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: driver)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"{driver}\n"))
    cell: dict[str, Any] = {}
    exec(source, cell)  # noqa: S102 - as Colab does
    assert cell["asked"].startswith(f"duetto[notebook{extra}] @ git+")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Jupyter's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name):
    notebook = read(name)
    stored = [shown(cell) for cell in code_cells(notebook)]
    run(notebook)
    assert [shown(cell) for cell in code_cells(notebook)] == stored
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    told = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stderr")
    assert [line for line in told.splitlines() if line and not line.startswith("duetto: ")] == []


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Jupyter's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name, llm", ENGINES.items(), ids=ENGINES)
def test_notebook_runs_with_the_choices_of_a_t4(name, llm):
    import nbformat

    notebook = read(name)
    cells, stored = code_cells(notebook), [shown(cell) for cell in code_cells(notebook)]
    notebook.cells.insert(0, nbformat.v4.new_code_cell(AS_ON_A_T4))
    choices = nbformat.v4.new_code_cell(SHOW_CHOICES.format(llm=llm) if llm else "print()")
    notebook.cells.insert(notebook.cells.index(cells[-1]), choices)
    run(notebook)
    assert [shown(cell) for cell in cells] == stored
    if llm:
        assert choices.outputs[0].text.strip() == CHOICES
