"""CPU kernels that an engine is to use, built at the first use on a machine."""

from ....cpu_kernels.build import BuildError, build_cached, library_file
from ...host import progress
from ...options.engine import EngineOptions


def build_kernels(options: EngineOptions, platform: str) -> None:
    """Build the library of CPU kernels into the user's cache, if the options ask for it on a CPU and it is
    not there. Raises ValueError with the reason if it cannot be built."""
    if not options.cpu_kernels or platform != "cpu":
        return
    try:
        if not library_file().exists():
            progress.say("compiling the CPU kernels, once; this takes about 10 s")
            build_cached()
    except (RuntimeError, BuildError) as error:
        raise ValueError(f"cpu_kernels=True is not allowed: {error}") from error
