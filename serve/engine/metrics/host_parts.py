"""Seconds that the host spends in each part of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from jax.profiler import TraceAnnotation

PART_NAMES = ("schedule", "put", "batch", "dispatch", "wait", "detokenize", "commit", "other")
Span = tuple[str, float, float]  # name of a part; its begin and its end in seconds of `time.perf_counter`

is_profiling = TraceAnnotation.is_enabled  # while no profile is recorded, no annotation is made


class HostPart:
    """A part of a step: `with part:` counts the block's seconds, and a profile shows the block as
    `duetto.<name>`.

    A block inside of another part's interrupts that part: no second is counted twice. A block costs 0.3 us,
    so its code is not divided into functions.
    """

    __slots__ = ("_label", "_parts", "name", "seconds")

    def __init__(self, parts: "HostParts", name: str):
        self._parts, self._label, self.name, self.seconds = parts, f"duetto.{name}", name, 0.0

    def __enter__(self) -> None:
        parts = self._parts
        outer, annotation = parts._current, TraceAnnotation(self._label) if is_profiling() else None
        parts._outer.append((outer, annotation))
        now = perf_counter()
        if outer is not None:
            outer.seconds += now - parts._since
            if parts._spans is not None:
                parts._spans.append((outer.name, parts._since, now))
        parts._current, parts._since = self, now

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        parts = self._parts
        now = perf_counter()
        self.seconds += now - parts._since
        if parts._spans is not None:
            parts._spans.append((self.name, parts._since, now))
        parts._since = now
        parts._current, annotation = parts._outer.pop()
        if annotation is not None:
            annotation.__exit__(None, None, None)


class HostParts:
    """Cumulative seconds of each part of the engine's steps. Their sum is the time of the steps.

    schedule: choosing the tokens that a step computes, draft tokens included, and noting what was dispatched.
    put: programs that set up slots, load grammars' masks and adapters, and move pages.
    batch: writing the rows of a call into arrays.
    dispatch: calling programs; the call copies its batch to the device.
    wait: waiting for results, or for pages of the tiers if no step can run.
    detokenize: appending results to requests: tokens, scores, text, stop conditions.
    commit: naming computed pages, release of slots and pages of ended requests.
    other: rest of a step.
    """

    def __init__(self):
        self._outer: list[tuple[HostPart | None, TraceAnnotation | None]] = []
        self._current: HostPart | None = None
        self._since, self._spans = 0.0, None
        self._all = [HostPart(self, name) for name in PART_NAMES]
        (
            self.schedule, self.put, self.batch, self.dispatch, self.wait, self.detokenize, self.commit,
            self.other,
        ) = self._all  # fmt: skip

    def report(self) -> dict[str, float]:
        """Return the seconds of each part since the last reset, by name."""
        return {part.name: part.seconds for part in self._all}

    def reset(self) -> None:
        """Count from zero again."""
        for part in self._all:
            part.seconds = 0.0

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        """Record the spans of all parts in the block, in the list that it yields."""
        self._spans = list[Span]()
        try:
            yield self._spans
        finally:
            self._spans = None
