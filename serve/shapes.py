"""Padding buckets: the closed table of shapes that an engine compiles, and the smallest one that holds a piece of work."""

from collections.abc import Iterable, Sequence

from .options import SMALLEST_CHUNK, round_up
from .programs import Shape

SMALLEST_WIDTH = 8
WIDEST = 4  # tokens of a verification for each seat


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def table(
    max_num_seqs: int,
    max_prefill_tokens: int,
    decode_steps: int,
    reproducible: bool,
    guesses: int = 0,
    nodes: int = 0,
    prefill_buckets: Sequence[int] | None = None,
) -> list[Shape]:
    """All shapes of an engine that verifies so many guesses of a row at most, which are a path in a tree of `nodes` if that is given.

    A prefill of SMALLEST_CHUNK is always one: the bits of all others are compared with its. Without the reproducibility
    contract prompts may share a prefill and decode may be narrow.
    """
    longest = round_up(max_prefill_tokens, SMALLEST_CHUNK)
    chunks = doublings(SMALLEST_CHUNK, longest)
    if prefill_buckets is not None:
        chunks = sorted({SMALLEST_CHUNK, longest, *(edge for edge in prefill_buckets if edge < longest)})
    widths = doublings(SMALLEST_WIDTH, round_up(max_num_seqs, SMALLEST_WIDTH))
    steps = sorted({1, decode_steps})
    prefill = [Shape("prefill", 1, chunk) for chunk in chunks]
    if not reproducible:
        widths = [1, *widths]
        prefill += [Shape("prefill", 4, chunk) for chunk in chunks if 4 * chunk <= chunks[-1]]
    decode = [Shape("decode", width, n) for width in widths for n in steps]
    return (
        prefill + decode + verifications(max_num_seqs, guesses, nodes, SMALLEST_WIDTH if reproducible else 1)
    )


def verifications(max_num_seqs: int, guesses: int, nodes: int, narrowest: int) -> list[Shape]:
    """Shapes for a row's last token and its guesses: as many as there can be, or few where many rows are decoded.

    A verification computes what decode of as many rows as it has tokens computes: the narrowest decode bounds it below. Above,
    rows beyond a shape take several calls.
    """
    if not guesses:
        return []
    longest = 1 << guesses.bit_length()
    seats = 1 << (max_num_seqs - 1).bit_length()
    found = []
    for tokens in [guesses + 1] if nodes else sorted({longest, max(2, longest // 4)}):
        first = max(1, narrowest // (nodes or tokens))
        last = max(first, min(seats, WIDEST * seats // (nodes or tokens)))
        found += [Shape("verify", rows, tokens) for rows in doublings(first, last)]
    return found


def smallest(shapes: Iterable[Shape], rows: int, tokens: int) -> Shape:
    """The shape with the fewest padded tokens that holds `rows` of `tokens`; one must."""
    fitting = [s for s in shapes if s.rows >= rows and s.tokens >= tokens]
    return min(fitting, key=lambda s: (s.rows * s.tokens, s.tokens))
