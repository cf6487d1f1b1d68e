"""Hooks of MkDocs.

The README is the first page. Links that leave docs/ go to GitHub. The help of commands and the fields of
records are put where a page asks for them.
"""

import dataclasses
import io
import os
import re
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
CODE = re.compile(r"<code>([^<\n]+)</code>")
WORD = re.compile(r"(?<!\S)\S{1,60}(?!\S)")
ASKED = re.compile(r"<!-- (help|fields): ([\w.]+) -->\n")


def on_files(files: Any, config: Any) -> Any:
    files.append(File.generated(config, "index.md", content=README.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    at = ROOT if uri == "index.md" else (ROOT / "docs" / uri).parent
    markdown = LINK.sub(lambda found: link(found, at, uri, config["repo_url"]), markdown)
    return ASKED.sub(lambda found: (help_of if found[1] == "help" else fields_of)(found[2]), markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Marks the words of code, which a browser would break behind a hyphen (`tables.css`)."""
    marked = r'<span class="word">\g<0></span>'
    return CODE.sub(lambda found: f"<code>{WORD.sub(marked, found[1])}</code>", html)


def link(found: re.Match[str], at: Path, uri: str, repository: str) -> str:
    """A link of a page that lies in `at`: to another page where there is one, else to the file on GitHub."""
    before, target, anchor, after = found[1], found[2], found[3] or "", found[4]
    if not target or "://" in target or target.startswith("mailto:"):
        return found[0]
    file = Path(os.path.normpath(at / target))
    if not file.exists():
        raise PluginError(f"{uri}: {target} does not exist")
    own = "index.md" if file == README else None
    if file.is_relative_to(ROOT / "docs"):
        own = file.relative_to(ROOT / "docs").as_posix()
    if own is None:
        kind = "tree" if file.is_dir() else "blob"
        return f"{before}{repository}/{kind}/main/{file.relative_to(ROOT).as_posix()}{anchor}{after}"
    return f"{before}{os.path.relpath(own, os.path.dirname(uri) or '.')}{anchor}{after}"


def help_of(command: str) -> str:
    """What `duetto COMMAND --help` prints; `duetto` is the command itself."""
    from duetto.serve.cli.main import parse_command_line

    os.environ["COLUMNS"] = "110"
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        parse_command_line(["--help"] if command == "duetto" else [command, "--help"])
    return f"```text\n{text.getvalue().rstrip()}\n```\n"


def fields_of(name: str) -> str:
    """A table of a record's fields, from their metadata."""
    module, _, record = name.rpartition(".")
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for f in dataclasses.fields(getattr(import_module(module), record)):
        kind = (
            f.type.__name__
            if type(f.type) is type
            else re.sub(r"\b(collections\.abc|typing)\.", "", str(f.type))
        )
        meaning = f.metadata.get("help", "").replace("|", "\\|")
        lines.append(f"| `{f.name}` | `{kind}` | `{f.default!r}` | {meaning} |")
    return "\n".join(lines) + "\n"
