"""What share of their time a pipeline's stages have nothing to do: the bubbles (GPipe, Huang et al., arXiv
1811.06965)."""

from collections.abc import Sequence


def drained(stages: int, micro_batches: int) -> float:
    """Where micro-batches enter one after the other, and the next only when all have left, as in training:
    (P - 1) / (P - 1 + M)."""
    return (stages - 1) / (stages - 1 + micro_batches)


def endless(seconds: Sequence[float], micro_batches: int) -> float:
    """Where a micro-batch enters again as soon as it has left, as in decoding: for stages that take so many
    seconds for one of them."""
    return 1 - sum(seconds) / (len(seconds) * cycle(seconds, micro_batches))


def cycle(seconds: Sequence[float], micro_batches: int) -> float:
    """Seconds between two steps that leave such a pipeline: those of its slowest stage, or of a micro-batch's
    way through all stages, divided among the micro-batches."""
    return max(max(seconds), sum(seconds) / micro_batches)
