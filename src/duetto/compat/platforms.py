"""`current_platform`: vLLM's questions about the devices, answered from jax. It frees memory too."""

import gc

import jax

from ..serve.host.process import trim_heap


class Platform:
    """Devices of this process. Any question except `is_rocm` starts jax's backend."""

    def is_cpu(self) -> bool:
        return jax.default_backend() == "cpu"

    def is_cuda(self) -> bool:
        return jax.default_backend() == "gpu"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Return False, because AMD's devices are not supported."""
        return False

    def empty_cache(self) -> None:
        """Free the memory of engines without references."""
        gc.collect()
        trim_heap()


current_platform = Platform()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines without references."""
    current_platform.empty_cache()
