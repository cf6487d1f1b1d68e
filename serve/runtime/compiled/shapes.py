"""Padding buckets: the closed table of shapes that an engine compiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from ....kvcache.kernels.cpu_attention import layers_read
from ....kvcache.pages import BLOCK
from ....kvcache.quantised import kept_as
from ....kvcache.stages import stations
from ....model.config import LayerKind
from ....model.pair import Params, target_of
from ....model.tree import nbytes
from ....model.weights.cpu.packed import kernels_in
from ....sampling.checks import MAX_LOGPROBS
from ....sampling.custom import LogitsProcessor
from ...options.checks import EDGE, SMALLEST_CHUNK, round_up
from ...options.engine import EngineOptions

SMALLEST_WIDTH = 8
# Rows of decode and tokens of prefill from which on padding costs an accelerator little: weights are read
# once for all of them.
WIDE_DECODE, WIDE_PREFILL = 64, 512
# tokens of a row of a shared prefill: long ones pad short prompts, short ones read a CPU's keys slowly
ROW_TOKENS = 32
# the same with CPU kernels, which read the keys of rows that go on with one another once; rows of one token
# take a third longer
SHORT_ROW_TOKENS = 2
SHARED = 2  # shapes of shared prefills on an accelerator, the largest: a CPU's padding costs what tokens cost
WIDEST = 4  # tokens of a verification for each slot
LIGHT = 1 << 30  # bytes that a CPU reads in some 40 ms: beside a longer step the host costs little

Phase = Literal["prefill", "decode", "verify", "deferred"]
PHASES = get_args(Phase)


class Shape(NamedTuple):
    """Rows B and tokens T of one compiled step; for decode T is the number of steps in one dispatch. A
    `deferred` shape is one step of decode in two programs, which draws its tokens once their masks are there.

    Rows of a prefill may be consecutive parts of one prompt, or of several. `packed` is the number of tokens
    that a verification computes, fewer than B T, of any rows; 0 if each row has its T.
    """

    phase: Phase
    rows: int
    tokens: int
    packed: int = 0

    @property
    def sequences(self) -> int:
        """Sequences of a full call; the rows of a prefill count as one prompt's."""
        return 1 if self.phase == "prefill" else self.rows

    @property
    def area(self) -> int:
        """Tokens computed, padding included."""
        return self.packed or self.rows * self.tokens

    @property
    def product_rows(self) -> int:
        """Rows of its matrix products: those of a decode's steps come one after another."""
        return self.rows if self.phase == "decode" else self.area

    @property
    def deferred(self) -> "Shape":
        """Twin of a decode that draws later."""
        return self._replace(phase="deferred")

    def rows_of(self, tokens: int) -> int:
        """Return the number of rows of `tokens` tokens that fit."""
        return min(self.rows, self.packed // tokens) if self.packed else self.rows

    def __str__(self) -> str:
        among = f" of {self.packed}" if self.packed else ""
        return f"{self.phase}[{self.rows},{self.tokens}]{among}"


class Canonical(NamedTuple):
    """Shapes whose bits the others of their phase are compared with. Under the reproducibility contract they
    are also the smallest, unless products are to have the same bits for every number of rows
    (`batch_invariant_matmul`, `cpu_kernels`)."""

    prefill: Shape
    decode: Shape

    @classmethod
    def on(cls, platform: str, options: EngineOptions, sizes: "Sizes") -> "Canonical":
        """Choose them: narrow on a CPU, whose time grows with rows from the first one on."""
        if platform == "cpu":
            return cls(Shape("prefill", 1, SMALLEST_CHUNK), Shape("decode", SMALLEST_WIDTH, 1))
        chunk = min(WIDE_PREFILL, last_edge(options, sizes.max_model_len))
        return cls(Shape("prefill", 1, chunk), Shape("decode", WIDE_DECODE, 1))


@dataclass(frozen=True)
class Sizes:
    """Fixed sizes of an engine. Slots, pages and rows are those of each of `shards`, whose steps are one."""

    max_model_len: int  # tokens of a request
    max_num_seqs: int  # slots
    pages: tuple[int, ...]  # for each window of the model
    page_size: int  # tokens
    hidden: int = 0  # size of the last hidden state that a slot keeps for a head; 0 without one
    n_top: int = MAX_LOGPROBS  # alternatives to a token that a step reports
    positions: int = 1  # tokens of a constrained row that a step samples at most
    kv_cache_dtype: str = "auto"  # as in the options
    shards: int = 1
    stride: int = 1  # pages behind which a recurrent layer's state is kept
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def seats(self) -> int:
        """Slots of all shards; those of shard i begin at i * max_num_seqs."""
        return self.shards * self.max_num_seqs

    @property
    def table_width(self) -> int:
        """Pages of a row, M, rounded up to whole blocks of attention."""
        tokens = -(-self.max_model_len // BLOCK) * BLOCK
        return -(-tokens // self.page_size)


def doublings(first: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def decided(options: EngineOptions, params: Params) -> EngineOptions:
    """Return the options with what prepared parameters, or ShapeDtypeStructs, decide: without `cpu_kernels`
    if kernels multiply none of them, whose shapes are then those of XLA's products, and with one decode step
    in a dispatch by default where these are large or of several stages."""
    if not kernels_in(params):
        return replace(options, cpu_kernels=False)
    target = target_of(params)
    looked_up = 0 if target.head is None else nbytes(target.embed)  # a step reads some rows of it
    is_light = nbytes(params) - looked_up <= LIGHT and stations(params) == 1
    return options if is_light else replace(options, decode_steps=options.decode_steps or 1)


def shared_row(options: EngineOptions, layers: Sequence[LayerKind], kv_cache_dtype: str, dtype: Any) -> int:
    """Return the tokens of a row of a shared prefill of a model that computes in `dtype`: few if CPU kernels
    read all of its keys."""
    kept = kept_as(kv_cache_dtype, dtype)
    is_short = options.cpu_kernels and layers_read(layers, kept, dtype) == len(layers)
    return SHORT_ROW_TOKENS if is_short else ROW_TOKENS


def shapes_of(
    options: EngineOptions, sizes: Sizes, layers: Sequence[LayerKind], platform: str, dtype: Any
) -> list[Shape]:
    """Return the `table` of an engine whose model has these layers and computes in `dtype`."""
    row = shared_row(options, layers, sizes.kv_cache_dtype, dtype) if platform == "cpu" else ROW_TOKENS
    return table(options, sizes, can_share(layers), platform, row)


def table(
    options: EngineOptions, sizes: Sizes, shared: bool, platform: str, row: int = ROW_TOKENS
) -> list[Shape]:
    """Return all shapes of an engine; prompts may share a prefill, in rows of `row` tokens, if `shared`.

    Without the reproducibility contract decode may be narrow, and prefill on a CPU too; with CPU kernels both
    may be, and small."""
    seats = sizes.max_num_seqs
    canonical = Canonical.on(platform, options, sizes)
    may_differ = options.reproducible and not options.batch_invariant_matmul
    fewest, chunk = SMALLEST_WIDTH, SMALLEST_CHUNK
    if may_differ:
        fewest, chunk = canonical.decode.rows, canonical.prefill.tokens
    if options.cpu_kernels and platform == "cpu":
        fewest, chunk = 1, EDGE
    narrowest = fewest if options.reproducible else 1
    widths = {narrowest, *doublings(fewest, max(fewest, round_up(seats, SMALLEST_WIDTH)))}
    decode = {Shape("decode", width, n) for width in widths for n in (1, options.steps_of(width))}
    prefill = prefills(options, sizes.max_model_len, shared, platform, chunk, row)
    beside = options.speculation.model is not None
    verify = verifications(seats, options.guesses, options.nodes, narrowest, beside)
    must = set(canonical) if options.reproducible else set()
    return sorted({*prefill, *decode, *verify, *must}, key=lambda s: (PHASES.index(s.phase), *s))


def last_edge(options: EngineOptions, most: int) -> int:
    """Tokens of the largest prefill: no more than a request's, of at most `most`, since shapes are compared
    on one text."""
    return round_up(min(options.prefill_tokens, most), SMALLEST_CHUNK)


def prefills(
    options: EngineOptions,
    most: int,
    shared: bool,
    platform: str,
    chunk: int = SMALLEST_CHUNK,
    row: int = ROW_TOKENS,
) -> list[Shape]:
    """Return the shapes of prefills of up to max_prefill_tokens: one row for a prompt that is alone, and rows
    of `row` tokens for several that share a call.

    The smallest has `chunk` tokens, or those of a smaller bucket of the options."""
    last = last_edge(options, most)
    edges = doublings(chunk, last)
    several = [Shape("prefill", area // row, row) for area in shared_areas(edges, platform, row) if shared]
    if options.prefill_buckets is not None:
        edges = sorted({chunk, last, *(edge for edge in options.prefill_buckets if edge < last)})
    return [Shape("prefill", 1, edge) for edge in edges] + several


def shared_areas(edges: list[int], platform: str, row: int) -> list[int]:
    """Return the tokens of prefills that several prompts share in rows of `row`: of these edges, and halfway
    between them where rows are short."""
    if platform != "cpu":
        return [edge for edge in edges if edge > SMALLEST_CHUNK][-SHARED:]
    if row == ROW_TOKENS:
        return [edge for edge in edges if edge >= SMALLEST_CHUNK]
    areas = [edge for edge in edges if edge >= ROW_TOKENS]
    return sorted({*areas, *(3 * area // 2 for area in areas[:-1])})


def can_share(layers: Iterable[LayerKind]) -> bool:
    """Return True if prompts may be cut into rows of a tile."""
    return all(not layer.state and layer.keys and layer.keys.can_share for layer in layers)


def row_tokens(shapes: Iterable[Shape], prompts: int) -> int:
    """Return the most tokens of a row of prefill if `prompts` prompts come together: short rows of several
    can share a call."""
    several = [s.tokens for s in shapes if s.rows > 1] if prompts > 1 else []
    return max(several or [s.tokens for s in shapes])


@cache
def shape_of_one(shapes: tuple[Shape, ...], tokens: int) -> Shape:
    """Return the prefill, of these shapes, of a prompt of `tokens` tokens that is alone: the one with the
    fewest padded tokens, of a single row or of short rows; of the longest row if none holds all of it."""
    holding = [s for s in shapes if s.area >= tokens and (s.rows == 1 or s.tokens == SHORT_ROW_TOKENS)]
    longest = max(shapes, key=lambda s: s.tokens)
    return min(holding, key=lambda s: (s.area, s.rows), default=longest)


def least_row(shapes: Iterable[Shape]) -> int:
    """Return the fewest tokens that a short prompt costs in a call with others."""
    return min([s.tokens for s in shapes if s.rows > 1] or [s.tokens for s in shapes])


def verifications(
    max_num_seqs: int, guesses: int, nodes: int, narrowest: int, beside: bool = False
) -> list[Shape]:
    """Shapes for a row's last token and its guesses, each row with as many as it is given.

    A verification computes what decode of as many rows as it has tokens computes: the narrowest decode bounds
    it below. Above, rows beyond a shape take several calls. The nodes of a tree are computed whole. What
    guesses `beside` the model does so for all rows of a shape: there are some of few rows.
    """
    if not guesses:
        return []
    tokens, seats = guesses + 1, 1 << (max_num_seqs - 1).bit_length()
    if nodes:
        first = max(1, narrowest // nodes)
        last = max(first, min(seats, WIDEST * seats // nodes))
        return [Shape("verify", rows, tokens) for rows in doublings(first, last)]
    first = max(narrowest, 1 << guesses.bit_length())
    areas = doublings(first, max(first, min(WIDEST * seats, seats * first)))
    few = {Shape("verify", min(area // first, seats), tokens, area) for area in areas if beside}
    return sorted(few | {Shape("verify", min(area, seats), tokens, area) for area in areas})


def holds(shape: Shape, rows: int, tokens: int, total: int = 0) -> bool:
    """Return True if a shape holds `rows` of at most `tokens`, `total` together."""
    return shape.rows >= rows and shape.tokens >= tokens and shape.area >= total


def smallest(shapes: Iterable[Shape], rows: int, tokens: int, total: int = 0) -> Shape:
    """Return the shape with the fewest padded tokens that holds `rows` of at most `tokens`, `total` together;
    at least one must."""
    fitting = [s for s in shapes if holds(s, rows, tokens, total)]
    return min(fitting, key=lambda s: (s.area, s.rows * s.tokens, s.tokens))
