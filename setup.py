"""Builds the CPU kernels where there is a compiler of C++; all else is in pyproject.toml."""

import os
import runpy
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/duetto/cpu_kernels")
KERNELS = runpy.run_path(str(FOLDER / "build.py"))
INSTALLED = sysconfig.get_path("purelib")  # of the environment that is installed into


class BuildKernels(build_ext):
    """The library is no module of Python: its name has no tag of an interpreter."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            KERNELS["build"](Path(self.get_ext_fullpath(ext.name)), KERNELS["headers"](INSTALLED))
        except KERNELS["BuildError"] as error:
            self.warn(f"duetto works without its CPU kernels, which were not built: {error}")


def sources(*names: str) -> list[str]:
    return sorted(str(path) for name in names for path in FOLDER.glob(name))


has_compiler = KERNELS["is_supported"]() and shutil.which(KERNELS["compiler"]()[0]) is not None
kernels = Extension(
    "duetto.cpu_kernels.kernels", sources("*.cc"), depends=sources("*.h", "build.py"), optional=True
)
setup(
    ext_modules=[kernels] if has_compiler else [],
    cmdclass={"build_ext": BuildKernels},
    # for its headers: of an installed jaxlib, or else of one that is fetched for the build alone
    setup_requires=["jaxlib>=0.10,<0.13"] if has_compiler and KERNELS["headers"](INSTALLED) is None else [],
)
