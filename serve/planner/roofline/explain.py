"""Table of the programs that an engine ran, beside the floors of their times."""

from ....kvcache.placement import everywhere
from ....kvcache.shards import splits_experts
from ....kvcache.stages import stations
from ...engine.core.engine import Engine
from ...runtime.compiled.shapes import Shape
from .facts import facts
from .floor import Demand, pair_demand, pools, starts
from .table import ShapeCost, floored, render_table
from .targets import Target, here


def explain(engine: Engine) -> str:
    """A table of the programs that ran: work, bytes, floor and the median of measured seconds.

    Rows have as many tokens in the cache as they had on average, empty ones included; those of a prefill are
    taken for one prompt's. Of a deferred decode, which is two programs, what XLA made is left out. On a host
    the peaks are measured first, in about a second.
    """
    if stations(engine.everything) > 1:
        return "stages and halves have no table here: duetto plan shows their floors"
    target = here(measure=True) if here().peaks is None else here()
    shapes = [shape for shape in list(engine.programs.steps) if str(shape) in engine.meter.spans]
    rows = [row_of(engine, shape, target) for shape in sorted(shapes)]
    return "\n".join(render_table(rows))


def row_of(engine: Engine, shape: Shape, target: Target) -> ShapeCost:
    meter = engine.meter
    config = engine.config
    params = engine.everything
    name, is_deferred = str(shape), shape.phase == "deferred"
    work = shape._replace(phase="decode") if is_deferred else shape
    devices = len(everywhere(params).device_set)
    dtype = engine.params.embed.dtype
    shards = engine.sizes.shards
    mean = meter.cached[name] / meter.steps[name] / (shards * shape.rows)
    context = max(round(mean - starts(work, 0).mean()), 0)
    over = shards if splits_experts(engine.params) else 1
    whole = pair_demand(work, config, dtype, context, params, engine.sizes.kv_cache_dtype, over)
    read = pools(work, config.layers, engine.cache, context)
    found = None if is_deferred else facts(engine.programs.steps[shape], read, shape.tokens)
    each = Demand(whole.flops * shards / devices, whole.bytes * shards / devices)
    return floored(ShapeCost(shape, each, None, None, found, meter.seconds_of(shape)), target, dtype)
