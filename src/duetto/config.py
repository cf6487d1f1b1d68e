"""Options that scripts for vLLM give as objects of `vllm.config`."""

from typing import TypedDict


class ProfilerConfig(TypedDict, total=False):
    """Where `start_profile` writes; the trace is jax.profiler's, whatever `profiler` says."""

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
