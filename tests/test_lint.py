"""What `make lint` runs, beside the tests: layout, style, types and the contracts of imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite.marks import full_if

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["ruff format --check .", "ruff check .", "lint-imports", "pyright"]


@full_if(lambda command: command == "pyright")
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command):
    program, *arguments = command.split()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [program, *arguments], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_make_lint_runs_the_same():
    text = (ROOT / "Makefile").read_text()
    assert text.partition("\nlint:")[2].partition("\n\n")[0].count("$(BIN)/") == len(COMMANDS)
    assert all(f"$(BIN)/{command}\n" in text for command in COMMANDS)
