"""The one name of `vllm.distributed` that scripts of one process call."""

import gc

from .serve.host.memory import give_back


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give back the memory of engines that nothing refers to any more."""
    gc.collect()
    give_back()
