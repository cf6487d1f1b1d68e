"""`current_platform`: questions of scripts for vLLM about the devices that jax has; it frees memory too."""

import gc

import jax

from ..serve.host.process import give_back


class Platform:
    """The devices of this process. A question about them starts jax's backend, `is_rocm` does not."""

    def is_cpu(self) -> bool:
        return jax.default_backend() == "cpu"

    def is_cuda(self) -> bool:
        return jax.default_backend() == "gpu"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Return False: AMD's devices are not supported."""
        return False

    def empty_cache(self) -> None:
        """Free the memory of engines without references."""
        gc.collect()
        give_back()


current_platform = Platform()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines without references."""
    current_platform.empty_cache()
