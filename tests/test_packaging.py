"""A release is whole: what its metadata, its long description and its source distribution must have."""

import re
import runpy
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DESCRIPTION = runpy.run_path(str(ROOT / "setup.py"))["long_description"]()
NOT_RELEASED = {".gitignore", "MANIFEST.in"}  # the first serves git alone; setuptools adds the second itself


def test_the_newest_section_of_the_changelog_is_the_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == PROJECT["version"]


def test_the_versions_of_python_are_those_that_are_required():
    versions = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert [int(version.removeprefix("3.")) for version in versions] == list(range(11, 11 + len(versions)))


def test_every_link_of_the_long_description_is_absolute():
    links = re.findall(r"\]\(([^)\s]+)\)", DESCRIPTION)
    assert len(links) > 40 and [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "https://raw.githubusercontent.com/duetto-ai/duetto/main/docs/images/request.svg" in links


def test_the_page_about_installing_has_all_extras():
    rows = re.findall(r"^\| (`.+`) \| .+ \|$", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_dependencies_have_lowest_versions_and_only_jax_a_highest():
    """`.ci/packages` installs the lowest ones; jaxlib follows jax."""
    found = [re.fullmatch(r"([\w-]+)(>=[\d.]+)?(,<[\d.]+)?(; .*)?", own) for own in PROJECT["dependencies"]]
    assert all(found) and [own[1] for own in found if not own[2]] == ["jaxlib"]
    assert [own[1] for own in found if own[3]] == ["jax"]


@pytest.mark.extras
def test_the_long_description_renders_as_an_index_shows_it():
    markdown = pytest.importorskip("readme_renderer.markdown")
    page = markdown.render(DESCRIPTION)
    assert page and "<table>" in page and 'alt="quickstart"' in page


def test_the_source_distribution_has_every_file_of_the_repository():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    words = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line[:1] != "#"]
    files = {name for word in words if word[0] == "include" for name in word[1:]}
    folders = {word[1] for word in words if word[0] == "graft"}
    packages = {"model", "kvcache", "sampling", "checkpoints", "serve", "src"}
    here = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert here - NOT_RELEASED == files | folders | packages | {"pyproject.toml", "setup.py"}


def test_shipped_weights_have_their_licence_beside_them():
    folders = [file.parent for file in (ROOT / "checkpoints").glob("*/*.safetensors")]
    assert len(folders) == 3
    beside = [Path(pattern).parent.as_posix() for pattern in PROJECT["license-files"] if "/" in pattern]
    for folder in folders:
        text = (folder / "LICENSE").read_text()
        assert "Apache License, Version 2.0" in text and "PSF License Agreement" in text
        assert any(folder.match(pattern) for pattern in beside)


def test_the_documentation_lists_all_former_names():
    listed = (ROOT / "docs" / "releasing.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \|", listed, re.MULTILINE)
    records = {"engine": EngineOptions, "server": ServerOptions, "router": RouterOptions}
    assert sorted(table) == sorted(
        (f.metadata["formerly"], f.name, kind)
        for kind, record in records.items()
        for f in fields(record)
        if "formerly" in f.metadata
    )
