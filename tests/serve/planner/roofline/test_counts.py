"""Work counted from sizes agrees with XLA's count of the programs that users run."""

from contextlib import nullcontext
from functools import cache

import jax.numpy as jnp
import pytest
from cases.targets import SMALL, compile_for, small_job
from fakes.greedy import greedy_programs

from duetto.model.transformer import decoder_spec
from duetto.model.tree import abstract, nbytes
from duetto.serve.planner.planning import abstract_arguments
from duetto.serve.planner.roofline.floor import demand
from duetto.serve.runtime.compiled.shapes import Shape

pytestmark = pytest.mark.as_served


@cache
def analysed(shape: Shape, context: int) -> dict[str, float]:
    """XLA's counts of a program."""
    job = small_job(context)
    found = compile_for(job, shape, abstract_arguments(job)).cost_analysis()
    assert found is not None
    return found


# XLA counts the body of the loop over blocks of 128 keys once: contexts are chosen so that the model counts
# as many.
@pytest.mark.parametrize(
    "shape, context", [(Shape("decode", 8, 1), 127), (Shape("prefill", 1, 256), 0)], ids=str
)
def test_operations_agree_with_xla(shape: Shape, context: int):
    with greedy_programs() if shape.phase == "prefill" else nullcontext():  # tokens are drawn in decode too
        counted = analysed(shape, max(context, 1))["flops"]
    assert demand(shape, SMALL, "float32", context).flops == pytest.approx(counted, rel=0.1)


def test_the_bytes_of_a_step_are_a_floor_of_those_xla_counts():
    shape = Shape("decode", 8, 1)
    weights = nbytes(abstract(decoder_spec(SMALL), jnp.dtype("float32")))
    assert weights < demand(shape, SMALL, "float32", 127).bytes < analysed(shape, 127)["bytes accessed"]
