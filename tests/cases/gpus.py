"""GPUs that are taken to be here: programs are traced as for them, and run on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from duetto.model import gpus
from duetto.serve.planner.roofline.targets import CHIPS


@contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """While this is entered, programs are traced for a GPU by its name, or by a target's, as if jax had the
    compiler for it."""
    name = CHIPS[kind].kind if kind in CHIPS else kind
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(name, 132, "gpu"))
    with patch.object(gpus, "compiles_for_gpus", lambda: True), use_abstract_mesh(mesh):
        yield
