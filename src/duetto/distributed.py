"""The function of `vllm.distributed` that scripts of one process call."""

import gc

from .serve.host.process import give_back


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines without references."""
    gc.collect()
    give_back()
