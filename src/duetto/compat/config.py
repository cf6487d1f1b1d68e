"""Options of `vllm.config`, which scripts for vLLM pass as objects."""

from typing import Any, TypedDict

from .module_aliases import PROCESSORS_HINT


class ProfilerConfig(TypedDict, total=False):
    """Options of `start_profile`: the folder to write to. Each `profiler` writes a trace of jax.profiler."""

    profiler: str | None
    torch_profiler_dir: str
    delay_iterations: int
    max_iterations: int


class CompilationConfig(TypedDict, total=False):
    """Options of vLLM's compiler, without effect: programs are compiled once, ahead of time."""

    level: int
    mode: int
    cudagraph_mode: str
    cudagraph_capture_sizes: list[int]


class KVTransferConfig(TypedDict, total=False):
    """Connector of KV pages; `kv_transfer_config` of `LLM` accepts some of them."""

    kv_connector: str
    kv_role: str
    kv_ip: str
    kv_port: int
    kv_rank: int
    kv_parallel_size: int
    kv_buffer_device: str
    kv_buffer_size: float
    kv_load_failure_policy: str
    kv_connector_module_path: str | None
    kv_connector_extra_config: dict[str, Any]
    engine_id: str


def __getattr__(name: str) -> Any:
    """Raise ImportError for a name that only processors in torch need."""
    if name == "VllmConfig":
        raise ImportError(f"{name} of vllm.config is not here: {PROCESSORS_HINT}")
    raise AttributeError(name)
