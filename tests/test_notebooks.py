"""The notebooks run from the first cell to the last, and open in Colab."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = ["01-quickstart", "02-what-a-step-costs", "03-speculation"]
COLAB = "https://colab.research.google.com/github/duetto-ai/duetto/blob/main/notebooks"


def read(name: str):
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_all_notebooks_are_listed():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_clean(name):
    notebook = read(name)
    assert notebook.metadata.kernelspec.name == "python3"
    assert f"{COLAB}/{name}.ipynb" in notebook.cells[0].source
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "pip install" in code[0].source and "git+https://github.com/duetto-ai/duetto" in code[0].source
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Jupyter's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name):
    from nbclient import NotebookClient

    notebook = read(name)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    told = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stderr")
    assert [line for line in told.splitlines() if line and not line.startswith("duetto: ")] == []
