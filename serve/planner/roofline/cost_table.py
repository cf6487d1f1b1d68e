"""A table of programs: what each must cost, what XLA made of it, and what it took."""

from dataclasses import dataclass, replace
from typing import Any

from ...runtime.compiled.shapes import Shape
from .floor import Demand
from .program_facts import ProgramFacts
from .targets import Target


@dataclass(frozen=True)
class ShapeCost:
    """Cost of a shape on each device.

    work: operations and bytes, counted analytically.
    floor: least seconds, if the peaks are known.
    bound: "compute" or "memory".
    facts: of the compiled program.
    seconds: measured.
    """

    shape: Shape
    work: Demand
    floor: float | None
    bound: str | None
    facts: ProgramFacts | None
    seconds: float | None = None

    @property
    def excess(self) -> float | None:
        """Return the bytes that the program touches over the least that it must touch."""
        return self.facts.bytes / self.work.bytes if self.facts else None


def with_floor(cost: ShapeCost, target: Target, dtype: Any) -> ShapeCost:
    """Return the cost with its floor, if the target's peaks are known."""
    if target.peaks is None:
        return cost
    peak_rates = target.peaks.flops(dtype), target.peaks.bandwidth
    return replace(cost, floor=cost.work.floor_seconds(*peak_rates), bound=cost.work.bottleneck(*peak_rates))


def render_cost_table(costs: list[ShapeCost]) -> list[str]:
    """Show a line for each program. Operations and the floor's bytes are counted analytically, the program's
    bytes in XLA's module."""
    heads = ("GFLOP", 9), ("least MB", 10), ("touched MB", 11), ("ratio", 6), ("FLOP/B", 8), ("floor ms", 10)
    head = f"{'program':<18}" + "".join(f"{name:>{width}}" for name, width in heads)
    head += f"  {'bound':<8}{'measured ms':>11}{'ratio':>7}{'temporaries MiB':>17}"
    return [head, *map(render_cost, costs)]


def render_cost(cost: ShapeCost) -> str:
    """Show the costs of one program."""
    w = cost.work
    f = cost.facts
    over = cost.seconds and cost.floor and cost.seconds / cost.floor
    parts = (
        f"{cost.shape!s:<18}{w.flops / 1e9:>9.2f}{w.bytes / 1e6:>10.1f}",
        f"{format_or_dash(f and f.bytes / 1e6, '.1f'):>11}{format_or_dash(cost.excess, '.2f'):>6}",
        f"{w.intensity:>8.1f}",
        f"{format_or_dash(cost.floor and cost.floor * 1e3, '.3f'):>10}  {cost.bound or '-':<8}",
        f"{format_or_dash(cost.seconds and cost.seconds * 1e3, '.2f'):>11}{format_or_dash(over, '.2f'):>7}",
        f"{format_or_dash(f and f.temporaries / 2**20, '.1f'):>17}",
    )
    return "".join(parts)


def format_or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def render_program_facts(f: ProgramFacts, link: float) -> str:
    """Show the facts of a compiled program. `link` is the rate between devices in bytes/s, 0 if unknown."""
    lines = [f"  updated in place {f.aliased / 2**20:.1f} MiB in {f.aliased_leaves} buffers"]
    lines += [f"  {f.thunks}"] if f.thunks else []
    lines += [f"  touches {f.most_bytes / 1e6:.1f} MB where its requests use every sampling parameter"]
    lines += [
        f"  {m.times} x {m.instruction} writes {m.buffer}, {m.bytes / 2**20:.1f} MiB" for m in f.moved[:8]
    ]
    for kind, c in f.collectives.items():
        time = f", {c.sent / link * 1e3:.3f} ms at {link / 1e9:.0f} GB/s" if link else ""
        sent = f"each device sends {c.sent / 2**20:.2f} MiB over its links{time}"
        lines.append(f"  {c.calls} x {kind}, {c.bytes / 2**20:.2f} MiB in all: {sent}")
    return "\n".join(lines)
