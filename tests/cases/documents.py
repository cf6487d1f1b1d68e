"""The code blocks of the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/README.md")])
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its line there, its language and its text without the indentation."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()
    found = []
    for match in FENCED.finditer(text):
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(name, text.count("\n", 0, match.start()) + 1, match[2], body))
    return found


def with_outputs(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """Yield each block of a page that is no output, with the output that stands below it."""
    found = blocks(page)
    for one, after in pairwise([*found, None]):
        if one is not None and one.language != "text":
            yield one, after if after is not None and after.language == "text" else None


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the command lines of a shell block as words, without comments."""
    pending = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        pending += line.removeprefix("$ ") + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        pending = ""
        if words:
            yield words
