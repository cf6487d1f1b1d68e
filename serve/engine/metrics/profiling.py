"""Profiles of host and device."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

PROFILE_FOLDER = "duetto-profile"  # the folder of traces, in the working directory


def start_profiling(config: Mapping[str, Any] | None, prefix: str | None) -> Path:
    """Record a profile until `stop_profiling`. Returns its folder: `torch_profiler_dir` of the option
    `profiler_config`, else `duetto-profile` in the working directory; `prefix` is a subfolder."""
    chosen = (config or {}).get("torch_profiler_dir")
    folder = Path(chosen or PROFILE_FOLDER, prefix or "").absolute()
    jax.profiler.start_trace(folder)
    print(f"duetto: recording a profile in {folder}", file=sys.stderr)
    return folder


def stop_profiling() -> None:
    jax.profiler.stop_trace()
    print("duetto: the profile is written; XProf, TensorBoard and Perfetto show it", file=sys.stderr)
