"""The package's long description, which is the README with absolute links, and the tags of a wheel with CPU
kernels. All else is in pyproject.toml."""

import re
from pathlib import Path

FILES = "https://github.com/duetto-ai/duetto/blob/main/"
KERNELS = Path(__file__).parent / "src" / "duetto" / "cpu_kernels" / "kernels.so"
IMAGES = "https://raw.githubusercontent.com/duetto-ai/duetto/main/"


def long_description() -> str:
    """The README with links to files of the repository as a package index needs them."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{IMAGES}", text)
    return re.sub(r"(\]\()(?!https?://|#)", rf"\1{FILES}", text)


if __name__ == "__main__":
    from setuptools import Distribution, setup
    from setuptools.command.bdist_wheel import bdist_wheel

    class Package(Distribution):
        def has_ext_modules(self) -> bool:
            return KERNELS.exists()  # built for one platform

    class Wheel(bdist_wheel):
        """Tag the wheel for every Python: ctypes loads the library."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        distclass=Package,
        cmdclass={"bdist_wheel": Wheel},
    )
