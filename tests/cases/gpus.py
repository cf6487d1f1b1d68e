"""GPUs and TPUs that are taken to be here: programs are traced as for them, and run on the CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from duetto.kvcache.kernels import attention
from duetto.model import gpus
from duetto.model.weights import expert_tiles
from duetto.serve.engine.startup import dtype, kernel_cases
from duetto.serve.planner.roofline.targets import CHIPS


@contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """While this is entered, programs are traced for a GPU by its name, or by a target's, as if jax had the
    compiler for it."""
    name = CHIPS[kind].kind if kind in CHIPS else kind
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(name, 132, "gpu"))
    with patch.object(gpus, "has_gpu_compiler", lambda: True), use_abstract_mesh(mesh):
        yield


def traced_for_tpu() -> AbstractContextManager[Any]:
    """While this is entered, programs are traced for a TPU."""
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("TPU v6 lite", 1, "tpu")))


@contextmanager
def served_as(name: str) -> Iterator[None]:
    """While this is entered, engines on this CPU take it for the GPU of a target: dtype, rules and checks of
    kernels are the GPU's. Programs are traced with its kernels, and lowered without them."""
    chip = CHIPS[name].gpu
    with ExitStack() as patches:
        patches.enter_context(patch.object(gpus, "has_gpu_compiler", lambda: True))
        patches.enter_context(patch.object(dtype, "gpu_from_device", lambda _: chip))
        for module in (gpus, attention, expert_tiles, kernel_cases):
            patches.enter_context(patch.object(module, "target_gpu", lambda: chip))
        yield
