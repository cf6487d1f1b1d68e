"""Padding buckets: the closed table of shapes that an engine compiles, and the smallest one that holds a piece of work."""

from collections.abc import Iterable

from ..model.config import Latent, ModelConfig
from .options import SMALLEST_CHUNK, EngineOptions, round_up
from .programs import Shape, Sizes

SMALLEST_WIDTH = 8
TILE, GATHERED_TILE = 32, 128  # tokens of a row of prefill
WIDEST = 4  # tokens of a verification for each seat


def doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def tile(config: ModelConfig, platform: str) -> int | None:
    """Tokens of a prompt that one row of prefill computes, None for all of a chunk.

    Rows of several prompts, and consecutive ones of the same, share a call: of each prompt only the last row is padded. Rows are
    longer where XLA gathers each row's own keys from main memory, and there is but one where a layer would make each row's anew.
    """
    if any(isinstance(layer.mixer, Latent) for layer in config.layers):
        return None
    return GATHERED_TILE if platform == "tpu" else TILE


def table(options: EngineOptions, sizes: Sizes, tile: int | None) -> list[Shape]:
    """All shapes of an engine, whose prefills have rows of so many tokens.

    A prefill of SMALLEST_CHUNK is always one: the bits of all others are compared with its. Without the reproducibility
    contract decode may be narrow.
    """
    seats, steps = sizes.max_num_seqs, sorted({1, options.decode_steps})
    widths = doublings(SMALLEST_WIDTH, round_up(seats, SMALLEST_WIDTH))
    narrowest = SMALLEST_WIDTH if options.reproducible else 1
    if not options.reproducible:
        widths = [1, *widths]
    decode = [Shape("decode", width, n) for width in widths for n in steps]
    verify = verifications(seats, options.guesses, options.nodes, narrowest)
    return prefills(options, sizes.max_model_len, tile) + decode + verify


def prefills(options: EngineOptions, most: int, tile: int | None) -> list[Shape]:
    """Shapes for up to max_prefill_tokens, in rows of a tile; no request has more than `most` tokens."""
    last = round_up(min(options.max_prefill_tokens, most), SMALLEST_CHUNK)
    edges = doublings(SMALLEST_CHUNK, last)
    if options.prefill_buckets is not None:
        edges = [SMALLEST_CHUNK, last, *(edge for edge in options.prefill_buckets if edge < last)]
    return sorted({prefill_of(edge, tile) for edge in edges})


def prefill_of(tokens: int, tile: int | None) -> Shape:
    """The prefill of so many tokens or a few more, in rows of a tile."""
    tile = min(tile or tokens, tokens)
    return Shape("prefill", -(-tokens // tile), tile)


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
    return min(fitting, key=lambda s: (s.area, s.tokens))
