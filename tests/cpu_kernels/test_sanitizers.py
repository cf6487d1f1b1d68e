"""The kernels under the compiler's sanitizers: memory, undefined behaviour, threads."""

import shutil
import subprocess
from pathlib import Path

import pytest

from duetto.cpu_kernels import build

HERE = Path(__file__).parent


@pytest.mark.minutes
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_kernels_under_sanitizers(sanitizers: str, tmp_path: Path):
    if not build.is_supported() or shutil.which(build.compiler()[0]) is None:
        pytest.skip("no compiler of C++, or no kernels for this machine")
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1", "-g"]
    program = tmp_path / "sanitize"
    *plain, amx = build.ISAS
    tiles = ["-include", str(HERE / "tiles.h")]
    kernels = build.kernels(tmp_path, flags, plain) | build.kernels(tmp_path, [*flags, *tiles], [amx])
    objects = build.compiled(kernels)
    own = [str(HERE / "sanitize.cc"), "-I", str(build.HERE), "-o", str(program)]
    build.run([*build.FLAGS, *flags, "-pthread", *objects, *own])
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("avx2"), done.stderr
