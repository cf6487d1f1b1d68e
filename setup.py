"""The package's long description: the README, with absolute links. All else is in pyproject.toml."""

import re
from pathlib import Path

FILES = "https://github.com/duetto-ai/duetto/blob/main/"
IMAGES = "https://raw.githubusercontent.com/duetto-ai/duetto/main/"


def long_description() -> str:
    """The README with links to files of the repository as a package index needs them."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{IMAGES}", text)
    return re.sub(r"(\]\()(?!https?://|#)", rf"\1{FILES}", text)


if __name__ == "__main__":
    from setuptools import setup

    setup(long_description=long_description(), long_description_content_type="text/markdown")
