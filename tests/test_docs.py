"""The documents name what is there, and build as a site without a warning."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import duetto
from duetto.serve.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/**/*.md")])
DIAGRAMS = sorted(ROOT.glob("docs/images/*.dot"))
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


def test_the_reference_has_all_commands_and_public_results():
    reference = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert set(re.findall(r"^<!-- help: (\w+) -->", reference["commands"], re.MULTILINE)) == {
        "duetto",
        *COMMANDS,
    }
    listed = set(re.findall(r"^::: duetto\.(\w+)$", "\n".join(reference.values()), re.MULTILINE))
    assert listed <= set(duetto.__all__)
    results = {name for name in duetto.__all__ if name.endswith(("Output", "Logprob", "LogLikelihood"))}
    assert results | {"LLM", "SamplingParams", "BeamSearchParams"} <= listed


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda path: path.name)
def test_a_diagram_shows_what_its_source_says(diagram: Path):
    source, picture = diagram.read_text(), diagram.with_suffix(".svg").read_text()
    labels = re.findall(r'label="([^"]+)"', source)
    labels += {
        name for name in re.findall(r"\b([a-z]+) ->", source) if not re.search(rf"{name} \[.*label", source)
    }
    assert len(labels) > 5
    for label in labels:
        assert all(f">{line}</text>" in picture for line in label.split("\\n")), label


@pytest.mark.extras
def test_the_site_builds_without_a_warning(tmp_path: Path):
    for package in ("material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.parent.name: path.read_text() for path in (tmp_path / "site").glob("**/index.html")}
    assert "usage: duetto batch INPUT OUTPUT" in pages["commands"]
    assert "presence_penalty" in pages["options"] and "tables.css" in pages["options"]
    # no line ends inside of it
    assert '<code><span class="word">--max-num-seqs</span></code>' in pages["batch"]
    assert "is prefilled once for its continuations" in pages["llm"] and "InputProcessor" not in pages["llm"]
    assert "require_complete" not in pages["outputs"]
    for name, page in pages.items():  # nothing is fetched from elsewhere, and no picture is drawn by a script
        assert (
            re.findall(r'(?:<script|<img|<link rel="stylesheet")[^>]+"https?://(?!colab)[^"]+"', page) == []
        ), name
        assert "mermaid" not in page, name
