"""Work counted from sizes agrees with XLA's count of programs that are compiled as users' are."""

from contextlib import nullcontext
from functools import cache

import jax.numpy as jnp
import pytest
from cases.targets import CompiledStep, compile_for, job_for
from fakes.greedy import greedy_programs
from suite.marks import full

from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs, tree_bytes
from duetto.serve.planner.engine_plan import abstract_arguments
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.planner.roofline.targets import local_target
from duetto.serve.runtime.compiled.shapes import Shape

pytestmark = pytest.mark.as_served


@cache
def analysed(shape: Shape) -> CompiledStep:
    """A step of test_targets.py, which is compiled once."""
    plan = job_for(local_target(), dtype="float32")
    with greedy_programs() if shape.phase == "prefill" else nullcontext():
        return compile_for(plan, shape, abstract_arguments(plan))


# XLA counts the body of the loop over blocks of 128 keys once: contexts are chosen so that the model counts
# as many.
@pytest.mark.parametrize(
    "shape, context", [(Shape("decode", 8, 1), 127), full(Shape("prefill", 16, 32), 0)], ids=str
)
def test_operations_agree_with_xla(shape: Shape, context: int):
    config = job_for(local_target()).config
    assert program_demand(shape, config, "float32", context).flops == pytest.approx(
        analysed(shape).operations("flops"), rel=0.1
    )


def test_a_steps_bytes_are_a_floor_of_xlas_count():
    shape, config = Shape("decode", 8, 1), job_for(local_target()).config
    weights = tree_bytes(shapes_from_specs(decoder_spec(config), jnp.dtype("float32")))
    assert (
        weights
        < program_demand(shape, config, "float32", 127).bytes
        < analysed(shape).operations("bytes accessed")
    )
