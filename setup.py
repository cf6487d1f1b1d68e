"""The long description of the package: the README, with absolute links. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

FILES = "https://github.com/duetto-ai/duetto/blob/main/"
IMAGES = "https://raw.githubusercontent.com/duetto-ai/duetto/main/"


def absolute(markdown: str) -> str:
    """The text with links to files of the repository as a package index needs them."""
    markdown = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{IMAGES}", markdown)
    return re.sub(r"(\]\()(?!https?://|#)", rf"\1{FILES}", markdown)


README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=absolute(README), long_description_content_type="text/markdown")
