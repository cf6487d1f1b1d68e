"""The documents name what is there, and build as a site without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/**/*.md")])
NAMED = re.compile(r"`([\w./-]+\.(?:py|sh))(?:(?:::|: )(\w+))?`")  # a file, and what stands in it
LINKED = re.compile(r"\]\(([^)\s#:]+)(?:#[\w-]+)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_names_in_a_document_are_there(document: Path):
    text = document.read_text()
    for path, name in NAMED.findall(text.replace("NAME.py", "")):
        file = next((file for folder in places(document) if (file := folder / path).exists()), None)
        assert file, f"`{path}` is not there"
        assert not name or re.search(rf"^\s*(async )?(def|class) {name}\b", file.read_text(), re.MULTILINE), (
            f"`{path}` has no {name}"
        )
    missing = [target for target in LINKED.findall(text) if not (document.parent / target).exists()]
    assert missing == []


def places(document: Path) -> tuple[Path, ...]:
    return ROOT, ROOT / "tests", document.parent


@pytest.mark.extras
def test_the_site_builds_without_a_warning(tmp_path: Path):
    for package in ("material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text()
    assert "usage: duetto batch INPUT OUTPUT" in page
    assert "presence_penalty" in (tmp_path / "site" / "reference" / "options" / "index.html").read_text()
