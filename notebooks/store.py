"""Run the notebooks and store them with their outputs, so that a page of the repository shows them: python
notebooks/store.py [NAME ...]

What the start of a model says on standard error is left out. `stored_for` in a notebook's metadata is a
digest of the sources that gave its outputs.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Of the sources of all code cells, in order."""
    return hashlib.sha256("\0".join(cell.source for cell in code_cells(notebook)).encode()).hexdigest()[:16]


def run(notebook: Any) -> None:
    nbclient.NotebookClient(
        notebook, timeout=1500, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()


def joined(outputs: Iterable[Any]) -> list[Any]:
    """Outputs in which text that was printed piece by piece is one."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def store(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    about = notebook.metadata | {"language_info": {"name": "python"}, "stored_for": digest(notebook)}
    run(notebook)
    notebook.metadata = about
    for cell in code_cells(notebook):
        cell.outputs = joined(output for output in cell.outputs if output.get("name") != "stderr")
    nbformat.write(notebook, file)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            store(path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
