"""Options that scripts for vLLM give as objects of `vllm.config`."""

from typing import TypedDict


class ProfilerConfig(TypedDict, total=False):
    """Folder that `start_profile` writes to. The trace is jax.profiler's for every `profiler`."""

    profiler: str | None
    torch_profiler_dir: str
    delay_iterations: int
    max_iterations: int


class CompilationConfig(TypedDict, total=False):
    """Without effect: programs are compiled once, ahead of time."""

    level: int
    mode: int
    cudagraph_mode: str
    cudagraph_capture_sizes: list[int]
