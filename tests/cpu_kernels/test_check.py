"""The kernels beside plain loops: under the compiler's sanitizers of memory, undefined behaviour and threads,
and those of another machine in an emulator."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from duetto.cpu_kernels import build
from duetto.cpu_kernels.library import load_library

HERE = Path(__file__).parent
TILES = ["-include", str(HERE / "tiles.h")]  # of an AMX that is emulated


def program(folder: Path, isas: Sequence[str], flags: Sequence[str]) -> Path:
    """The program that checks the kernels of some instruction sets."""
    kernels: dict[str, list[str]] = {}
    for isa in isas:
        kernels |= build.kernel_compiler_arguments(
            folder, [*flags, *TILES] if isa == "avx512_amx" else flags, [isa]
        )
    made, each = folder / "check", " ".join(f"X({isa})" for isa in isas)
    own = [
        f"-DFOR_EACH_ISA(X)={each}",
        str(HERE / "check.cc"),
        "-I",
        str(build.SOURCE_FOLDER),
        "-o",
        str(made),
    ]
    build.run_compiler([*build.COMPILER_FLAGS, *flags, "-pthread", *build.compile_objects(kernels), *own])
    return made


def sanitized(sanitizers: str) -> list[str]:
    return [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1"]


def check(command: Sequence[str | Path], isas: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0 and done.stdout.split() == list(isas), done.stderr


@pytest.mark.full
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_under_sanitizers(sanitizers: str, tmp_path: Path):
    isas = tuple(reversed(load_library().isas))
    if not isas or shutil.which(build.compiler_command()[0]) is None:
        pytest.skip("no compiler of C++, or no kernels for this machine")
    if sanitizers == "thread":  # which threads share does not depend on the instruction set
        isas = isas[-1:]
    elif isas[-1] == "avx512_bf16":
        isas += ("avx512_amx",)
    check([program(tmp_path, isas, sanitized(sanitizers))], isas)


@pytest.mark.extras
def test_kernels_of_arm_in_an_emulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compiler, emulator, libraries = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip(f"no {compiler}, or no {emulator}")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")  # which the emulator does not support
    made = program(tmp_path, list(build.ARM), sanitized("address,undefined"))
    check([emulator, "-cpu", "max", "-L", libraries, made], list(build.ARM))
