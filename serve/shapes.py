"""Padding buckets: the closed table of shapes that an engine compiles, and the smallest one that holds a piece of work."""

from collections.abc import Iterable

from .programs import Shape

SMALLEST_CHUNK = 64
SMALLEST_WIDTH = 8


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def table(max_num_seqs: int, max_prefill_tokens: int, decode_steps: int, reproducible: bool) -> list[Shape]:
    """All shapes of an engine. Without the reproducibility contract prompts may share a prefill and decode may be narrow."""
    chunks = doublings(SMALLEST_CHUNK, round_up(max_prefill_tokens, SMALLEST_CHUNK))
    widths = doublings(SMALLEST_WIDTH, round_up(max_num_seqs, SMALLEST_WIDTH))
    steps = sorted({1, decode_steps})
    prefill = [Shape("prefill", 1, chunk) for chunk in chunks]
    if not reproducible:
        widths = [1, *widths]
        prefill += [Shape("prefill", 4, chunk) for chunk in chunks if 4 * chunk <= chunks[-1]]
    return prefill + [Shape("decode", width, n) for width in widths for n in steps]


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def smallest(shapes: Iterable[Shape], rows: int, tokens: int) -> Shape:
    """The shape with the fewest padded tokens that holds `rows` of `tokens`; one must."""
    fitting = [s for s in shapes if s.rows >= rows and s.tokens >= tokens]
    return min(fitting, key=lambda s: (s.rows * s.tokens, s.tokens))
