"""A table of programs: what each must cost, what XLA made of it, and what it took."""

from dataclasses import dataclass, replace
from typing import Any

from ...runtime.compiled.shapes import Shape
from .facts import ProgramFacts
from .floor import Demand
from .targets import Target


@dataclass(frozen=True)
class ShapeCost:
    """A shape's work on each device, its floor in seconds where the peaks are known, what XLA made of it, and
    measured seconds."""

    shape: Shape
    work: Demand
    floor: float | None
    bound: str | None
    facts: ProgramFacts | None
    seconds: float | None = None

    @property
    def excess(self) -> float | None:
        """Bytes that the program touches over those it must."""
        return self.facts.bytes / self.work.bytes if self.facts else None


def floored(row: ShapeCost, target: Target, dtype: Any) -> ShapeCost:
    """The row with its floor, where the target's peaks are known."""
    if target.peaks is None:
        return row
    at_most = target.peaks.flops(dtype), target.peaks.bandwidth
    return replace(row, floor=row.work.floor(*at_most), bound=row.work.bound(*at_most))


def render_table(rows: list[ShapeCost]) -> list[str]:
    """A line for each program. Operations and the floor's bytes are counted analytically, the program's in
    XLA's module."""
    heads = ("GFLOP", 9), ("least MB", 10), ("touched MB", 11), ("ratio", 6), ("FLOP/B", 8), ("floor ms", 10)
    head = f"{'program':<18}" + "".join(f"{name:>{width}}" for name, width in heads)
    head += f"  {'bound':<8}{'measured ms':>11}{'ratio':>7}{'temporaries MiB':>17}"
    return [head, *map(render_row, rows)]


def render_row(row: ShapeCost) -> str:
    w = row.work
    f = row.facts
    over = row.seconds and row.floor and row.seconds / row.floor
    parts = (
        f"{row.shape!s:<18}{w.flops / 1e9:>9.2f}{w.bytes / 1e6:>10.1f}",
        f"{or_dash(f and f.bytes / 1e6, '.1f'):>11}{or_dash(row.excess, '.2f'):>6}{w.intensity:>8.1f}",
        f"{or_dash(row.floor and row.floor * 1e3, '.3f'):>10}  {row.bound or '-':<8}",
        f"{or_dash(row.seconds and row.seconds * 1e3, '.2f'):>11}{or_dash(over, '.2f'):>7}",
        f"{or_dash(f and f.temporaries / 2**20, '.1f'):>17}",
    )
    return "".join(parts)


def or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def render_fact(f: ProgramFacts, link: float) -> str:
    """Show what XLA made of a program; `link` is the rate between devices in bytes/s, 0 if unknown."""
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
