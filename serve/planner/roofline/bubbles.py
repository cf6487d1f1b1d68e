"""Bubbles: the share of a pipeline's time in which its stages have no work (GPipe, Huang et al., arXiv
1811.06965)."""

from collections.abc import Sequence


def drained_bubbles(stages: int, micro_batches: int) -> float:
    """Return the bubbles of a pipeline that drains: the next micro-batches enter when all have left, as in
    training. This is (P - 1) / (P - 1 + M)."""
    return (stages - 1) / (stages - 1 + micro_batches)


def steady_bubbles(seconds: Sequence[float], micro_batches: int, link_seconds: float = 0.0) -> float:
    """Return the bubbles of a pipeline that a micro-batch enters again as soon as it has left, as in
    decoding.

    seconds: time of each stage for one micro-batch.
    link_seconds: seconds that a micro-batch takes between stages.
    """
    return 1 - sum(seconds) / (len(seconds) * pipeline_step_seconds([*seconds, link_seconds], micro_batches))


def pipeline_step_seconds(seconds: Sequence[float], micro_batches: int) -> float:
    """Return the seconds between two steps of a pipeline that does not drain: max(max(seconds), sum(seconds)
    / micro_batches). Either the slowest stage is always busy, or the micro-batches are too few to fill the
    stages."""
    return max(max(seconds), sum(seconds) / micro_batches)
