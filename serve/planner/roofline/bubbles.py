"""Bubbles: the share of a pipeline's time in which its stages have no work (GPipe, Huang et al., arXiv
1811.06965)."""

from collections.abc import Sequence


def drained(stages: int, micro_batches: int) -> float:
    """Bubbles where the next micro-batches enter when all have left, as in training:
    (P - 1) / (P - 1 + M)."""
    return (stages - 1) / (stages - 1 + micro_batches)


def endless(seconds: Sequence[float], micro_batches: int, links: float = 0.0) -> float:
    """Bubbles where a micro-batch enters again as soon as it has left, as in decoding.

    seconds: of each stage for one micro-batch.
    links: seconds in which it is on its way between stages.
    """
    return 1 - sum(seconds) / (len(seconds) * cycle([*seconds, links], micro_batches))


def cycle(seconds: Sequence[float], micro_batches: int) -> float:
    """Seconds between two steps that leave such a pipeline: those of its slowest stage, or of a micro-batch's
    way through all stages, divided among the micro-batches."""
    return max(max(seconds), sum(seconds) / micro_batches)
