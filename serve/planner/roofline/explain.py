"""Table of the programs that an engine ran, beside the floors of their times."""

from ....kvcache.shardings import sampling_sharding
from ....kvcache.shards import has_split_experts
from ....kvcache.stages import num_device_groups
from ...engine.core.engine import Engine
from ...runtime.compiled.shapes import Shape
from .cost_table import ShapeCost, render_cost_table, with_floor
from .floor import Demand, describe_pool_buffers, draft_pair_demand, row_starts
from .program_facts import join_facts, read_program_facts
from .targets import Target, local_target


def explain_programs(engine: Engine) -> str:
    """Return a table of the programs that ran: work, bytes, floor and the median of measured seconds.

    Rows have the mean number of cached tokens that they had, empty rows included. A prefill's rows are taken
    for one prompt's. On a host the peaks are measured first, in about a second.
    """
    if num_device_groups(engine.all_params) > 1:
        return "stages and halves have no table here: duetto plan shows their floors"
    target = local_target(measure=True) if local_target().peaks is None else local_target()
    shapes = [shape for shape in list(engine.programs.steps) if str(shape) in engine.stats.call_seconds]
    costs = [measured_cost(engine, shape, target) for shape in sorted(shapes)]
    return "\n".join(render_cost_table(costs))


def measured_cost(engine: Engine, shape: Shape, target: Target) -> ShapeCost:
    """Return the cost of a shape that the engine ran, with the median of its seconds."""
    stats = engine.stats
    config = engine.config
    params = engine.all_params
    name = str(shape)
    devices = len(sampling_sharding(params).device_set)
    dtype = engine.params.embed.dtype
    shards = engine.sizes.shards
    mean = stats.cached_by_shape[name] / stats.calls_by_shape[name] / (shards * shape.rows)
    context = max(round(mean - row_starts(shape, 0).mean()), 0)
    expert_shards = shards if has_split_experts(engine.params) else 1
    total = draft_pair_demand(
        shape, config, dtype, context, params, engine.sizes.kv_cache_dtype, expert_shards
    )
    pool_buffers = describe_pool_buffers(shape, config.layers, engine.cache, context)
    parts = engine.programs.step_parts(shape)
    program_facts = join_facts([read_program_facts(part, pool_buffers, shape.tokens) for part in parts])
    device_demand = Demand(total.flops * shards / devices, total.bytes * shards / devices)
    return with_floor(
        ShapeCost(shape, device_demand, None, None, program_facts, stats.median_seconds(shape)), target, dtype
    )
