"""A small engine in simulated time."""

import jax.numpy as jnp
from cases.models import TINY

from benchmarks.measured_times import MeasuredTimes
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.simulation.engine_simulation import Simulation
from duetto.serve.planner.simulation.step_times import HostTimes, StepCall
from duetto.serve.runtime.compiled.shapes import Shape, Sizes


class Even:
    """Every call takes a second in each stage, or what it is told."""

    def __init__(self, stages: int = 1, seconds: float = 1.0):
        self.num_stages, self.seconds = stages, seconds

    def __call__(self, call: StepCall) -> list[float]:
        return [self.seconds] * self.num_stages


def simulation(
    times=None,
    pages: int = 40,
    config=TINY,
    acceptance: float = 0.0,
    host=0.0,
    seat=0.0,
    shards: int = 1,
    longest=256,
    **options,
) -> Simulation:
    given = {"max_num_seqs": 8, "page_size": 16, "max_model_len": longest, "max_prefill_tokens": 128}
    chosen = EngineOptions(**given | options)
    counts = tuple(pages if window is None else 8 * 17 for window in config.windows)
    sizes = Sizes(longest, chosen.num_slots // shards, counts, chosen.page_size, shards=shards)
    params = shapes_from_specs(decoder_spec(config), jnp.dtype("float32"))
    known = times or MeasuredTimes({Shape("prefill", 1, 64): (0.5, 1e-3), Shape("decode", 8, 1): (0.1, 1e-4)})
    return Simulation(
        config,
        params,
        chosen,
        sizes,
        known,
        "cpu",
        acceptance=acceptance,
        host=HostTimes(row=host, slot=seat),
    )
