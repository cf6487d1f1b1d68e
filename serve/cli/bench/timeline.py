"""Timeline of one decode step, host and device, as an SVG picture.

A call occupies the device from its dispatch, or from the end of the call before, until its tokens are ready:
a thread waits for them. On a CPU the dispatch itself may compute.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from itertools import groupby
from time import perf_counter
from typing import Any

import jax

from ...engine.metrics.host_parts import PART_NAMES, Span
from ...llm.llm import LLM

MIN_STEPS = 8  # recorded steps; the first ones do not count
WARMUP_STEPS = 4
WIDTH, MARGIN, LANE_X, LANE_HEIGHT, ROW_HEIGHT = 900, 16, 76, 30, 20  # pixels
HOST_Y, DEVICE_Y, AXIS_Y, LEGEND_Y = 44, 82, 128, 160  # pixels from the top
NUM_TICKS, LEGEND_COLUMNS = 6, 3
COLOURS = dict[str, str](
    zip(
        (*PART_NAMES, "device"),
        ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#d3d3d3", "#b07aa1", "#edc948", "#9c755f", "#76b7b2"),
        strict=True,
    )
)


@dataclass(frozen=True)
class StepTimeline:
    """Spans of one step on the host and on the device.

    seconds: its duration.
    host: spans of the host's parts, in seconds from the step's begin.
    device: spans of the calls that occupy the device.
    """

    seconds: float
    host: list[Span]
    device: list[Span]

    @property
    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of each part of the host, and of the device."""
        totals = dict.fromkeys(COLOURS, 0.0)
        for name, begin, end in self.host + self.device:
            totals[name] += end - begin
        return totals


def record_timeline(llm: LLM, repeats: int) -> StepTimeline:
    """Step an engine that decodes, and return the step of median duration."""
    steps = list[list[Span]]()
    host_parts = llm.engine.stats.host_parts
    with ThreadPoolExecutor(1) as pool:
        jobs = []
        for _ in range(WARMUP_STEPS + max(repeats, MIN_STEPS)):
            with host_parts.record() as spans:
                llm.step()
            steps.append(spans)
            *_, call = llm.engine.in_flight_steps.calls
            jobs.append(pool.submit(wait_until_ready, call.output.sampled.token))
        ready_times = [job.result() for job in jobs]
    chosen = sorted(steps[WARMUP_STEPS:], key=lambda spans: spans[-1][2] - spans[0][1])
    spans = chosen[len(chosen) // 2]
    begin, end = spans[0][1], spans[-1][2]
    calls = clip_spans(find_device_spans(steps, ready_times), begin, end)
    return StepTimeline(end - begin, [*clip_spans(join_spans(spans), begin, end)], [*calls])


def wait_until_ready(x: Any) -> float:
    """Wait for an array; returns the time, in seconds of `time.perf_counter`."""
    jax.block_until_ready(x)
    return perf_counter()


def find_device_spans(steps: Sequence[Sequence[Span]], ready_times: Sequence[float]) -> Iterator[Span]:
    """Yield the span of each step's call on the device, given the host's spans and the time at which the
    tokens of each step were ready."""
    last_ready = 0.0
    for spans, ready in zip(steps, ready_times, strict=True):
        dispatched = min(begin for name, begin, _ in spans if name == "dispatch")
        yield "device", max(dispatched, last_ready), ready
        last_ready = ready


def join_spans(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans, of which successive ones of a part are joined."""
    for name, group in groupby(spans, key=lambda span: span[0]):
        (_, begin, end), *rest = group
        yield name, begin, rest[-1][2] if rest else end


def clip_spans(spans: Iterable[Span], begin: float, end: float) -> Iterator[Span]:
    """Yield the parts of spans between two times, in seconds from the first time."""
    for name, first, last in spans:
        if first < end and last > begin:
            yield name, max(first, begin) - begin, min(last, end) - begin


# ---------------------------------------------------------------- the picture


def render_timeline(timeline: StepTimeline, title: str) -> str:
    """Return an SVG of a timeline, with a legend that names every part."""
    scale = (WIDTH - MARGIN - LANE_X) / timeline.seconds
    lanes = (("host", HOST_Y, timeline.host), ("device", DEVICE_Y, timeline.device))
    rows = -(-len(COLOURS) // LEGEND_COLUMNS)
    height = LEGEND_Y + rows * ROW_HEIGHT + MARGIN
    elements = [draw_text(MARGIN, 24, f"{title}: {format_ms(timeline.seconds)}")]
    for name, y, spans in lanes:
        elements.append(draw_text(MARGIN, y + 20, name))
        elements.append(draw_box(LANE_X, y, WIDTH - MARGIN - LANE_X, LANE_HEIGHT, "#f6f6f6", ""))
        for part, begin, end in spans:
            label = f"{part}, {format_ms(end - begin)} from {format_ms(begin)}"
            x, width = LANE_X + begin * scale, (end - begin) * scale
            elements.append(draw_box(x, y, width, LANE_HEIGHT, COLOURS[part], label))
    for i in range(NUM_TICKS):
        seconds = timeline.seconds * i / (NUM_TICKS - 1)
        elements.append(draw_text(LANE_X + seconds * scale, AXIS_Y, format_ms(seconds), "middle"))
    elements += draw_legend(timeline)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="12" '
        f'font-family="sans-serif">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def draw_legend(timeline: StepTimeline) -> Iterator[str]:
    """Yield a box and a text for each part: its seconds, and its share of the step."""
    for i, (part, seconds) in enumerate(timeline.seconds_by_part.items()):
        x = MARGIN + i % LEGEND_COLUMNS * (WIDTH - 2 * MARGIN) // LEGEND_COLUMNS
        y = LEGEND_Y + i // LEGEND_COLUMNS * ROW_HEIGHT
        yield draw_box(x, y - 10, 12, 12, COLOURS[part], "")
        yield draw_text(x + 18, y, f"{part} {format_ms(seconds)}, {seconds / timeline.seconds:.1%}")


def draw_box(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    """Return a filled rectangle; a browser shows `label` under the pointer."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    box = f'{place} fill="{colour}" stroke="white" stroke-width="0.5"'
    return f"<rect {box}><title>{escape(label)}</title></rect>" if label else f"<rect {box}/>"


def draw_text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
