"""What an engine's programs did while serving, beside what they cannot be faster than."""

from ..engine.engine import Engine
from ..programs.shapes import Shape
from .facts import facts
from .floor import Work, pools, starts, work
from .table import Cost, floored, render_table
from .targets import Target, here


def explain(engine: Engine) -> str:
    """A table of the programs that ran: work, bytes, floor and the median of measured seconds.

    Rows have as many tokens in the cache as they had on average, empty ones included; those of a prefill are taken for one prompt's.
    On a host the peaks are measured first, in about a second.
    """
    target = here(measure=True) if here().peaks is None else here()
    shapes = [shape for shape in engine.programs.steps if str(shape) in engine.meter.spans]
    rows = [row_of(engine, shape, target) for shape in sorted(shapes)]
    return "\n".join(render_table(rows))


def row_of(engine: Engine, shape: Shape, target: Target) -> Cost:
    meter, config, params = engine.meter, engine.config, engine.params
    name, devices = str(shape), len(params.embed.sharding.device_set)
    mean = meter.cached[name] / meter.steps[name] / shape.rows
    context = max(round(mean - starts(shape, 0).mean()), 0)
    whole = work(shape, config, params.embed.dtype, context, params)
    found = facts(engine.programs.steps[shape], pools(shape, config, engine.cache, context), shape.tokens)
    row = Cost(
        shape, Work(whole.flops / devices, whole.bytes / devices), None, None, found, meter.seconds_of(shape)
    )
    return floored(row, target, params.embed.dtype)
