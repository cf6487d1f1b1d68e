"""Padding buckets: the closed table of shapes that an engine compiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from ....kvcache.kernels.cpu_attention import count_kernel_layers
from ....kvcache.pages import KEYS_PER_BLOCK
from ....kvcache.quantised import choose_cache_format
from ....kvcache.stages import num_device_groups
from ....model.config import LayerKind
from ....model.draft_pair import EngineParams, target_params
from ....model.tree import tree_bytes
from ....model.weights.cpu.packed import kernel_isa
from ....sampling.checks import MAX_LOGPROBS, RAW_LOGPROBS
from ....sampling.custom_processors import LogitsProcessor
from ...options.checks import BUCKET_MULTIPLE_TOKENS, SMALLEST_CHUNK_TOKENS, round_up
from ...options.engine import EngineOptions

MIN_DECODE_ROWS = 8  # rows of a CPU's canonical decode; the widest decode is rounded up to a multiple of it
# Rows of decode and tokens of prefill up to which padding costs an accelerator little: it reads the weights
# once for all of them.
WIDE_DECODE_ROWS, WIDE_PREFILL_TOKENS = 64, 512
# Tokens of a row of a shared prefill: long rows pad short prompts, with short rows a CPU reads keys slowly.
ROW_TOKENS = 32
# Tokens of such a row with CPU kernels, which read the keys of a prompt's consecutive rows once. Rows of one
# token take a third longer.
SHORT_ROW_TOKENS = 2
# Number of shared prefills on an accelerator, the largest; on a CPU padding is as slow as tokens.
MAX_SHARED_SHAPES = 2
VERIFY_TOKENS_PER_SLOT = 4  # tokens of the largest verification, for each slot
# Bytes that a CPU reads in some 40 ms; with a longer step the host's time matters little.
LIGHT_STEP_BYTES = 1 << 30

Phase = Literal["prefill", "decode", "verify"]
PHASES = get_args(Phase)


class Shape(NamedTuple):
    """Shape of one compiled step. Rows of a prefill may be consecutive parts of one prompt, or of several.

    phase: what the step computes.
    rows: number of rows, B.
    tokens: number of tokens of a row, T; for decode the number of steps in one dispatch.
    packed_tokens: number of tokens that a verification computes, of any rows, fewer than B T; 0 if each row
    has T.
    """

    phase: Phase
    rows: int
    tokens: int
    packed_tokens: int = 0

    @property
    def num_sequences(self) -> int:
        """Number of sequences of a full step; the rows of a prefill count as one prompt's."""
        return 1 if self.phase == "prefill" else self.rows

    @property
    def area(self) -> int:
        """Number of tokens that the step computes, padding included."""
        return self.packed_tokens or self.rows * self.tokens

    @property
    def product_rows(self) -> int:
        """Number of rows of the step's matrix products. The steps of a decode run one after another."""
        return self.rows if self.phase == "decode" else self.area

    def max_rows(self, tokens: int) -> int:
        """Return the number of rows of `tokens` tokens that fit in a step."""
        return min(self.rows, self.packed_tokens // tokens) if self.packed_tokens else self.rows

    def __str__(self) -> str:
        packed = f" of {self.packed_tokens}" if self.packed_tokens else ""
        return f"{self.phase}[{self.rows},{self.tokens}]{packed}"


class CanonicalShapes(NamedTuple):
    """Shapes whose bits the other shapes of their phase are compared with.

    Under the reproducibility contract they are also the smallest shapes, unless products have the same bits
    for every number of rows (`batch_invariant_matmul`, `cpu_kernels`).
    """

    prefill_shape: Shape
    decode_shape: Shape

    @classmethod
    def choose(cls, platform: str, options: EngineOptions, sizes: "Sizes") -> "CanonicalShapes":
        """Choose the canonical shapes: narrow ones on a CPU, whose time grows with every row."""
        if platform == "cpu":
            return cls(Shape("prefill", 1, SMALLEST_CHUNK_TOKENS), Shape("decode", MIN_DECODE_ROWS, 1))
        tokens = min(WIDE_PREFILL_TOKENS, largest_prefill_tokens(options, sizes.max_model_len))
        return cls(Shape("prefill", 1, tokens), Shape("decode", WIDE_DECODE_ROWS, 1))


@dataclass(frozen=True)
class Sizes:
    """Fixed sizes of an engine. Slots, pages and rows are counted in each shard; one step is of all shards.

    max_model_len: tokens of a request, at most.
    max_num_seqs: number of slots.
    pages: number of pages of each window of the model.
    page_size: tokens of a page.
    hidden: size of the last hidden state that a slot keeps for a draft head; 0 without a head.
    n_top: number of alternatives to a token that a step reports.
    positions: tokens of a constrained row that a step samples, at most.
    kv_cache_dtype: the option.
    shards: number of shards.
    state_stride: number of pages between two stored states of a recurrent layer.
    processors: logits processors of the engine.
    embedding_rows: number of rows of the pool of embeddings; 0 without an encoder.
    logprobs_mode: the option.
    """

    max_model_len: int
    max_num_seqs: int
    pages: tuple[int, ...]
    page_size: int
    hidden: int = 0
    n_top: int = MAX_LOGPROBS
    positions: int = 1
    kv_cache_dtype: str = "auto"
    shards: int = 1
    state_stride: int = 1
    processors: tuple[LogitsProcessor, ...] = ()
    embedding_rows: int = 0
    logprobs_mode: str = RAW_LOGPROBS

    @property
    def num_slots(self) -> int:
        """Number of slots of all shards. The slots of shard i begin at i * max_num_seqs."""
        return self.shards * self.max_num_seqs

    @property
    def table_width(self) -> int:
        """Number of pages of a row, M, rounded up to whole blocks of attention."""
        tokens = -(-self.max_model_len // KEYS_PER_BLOCK) * KEYS_PER_BLOCK
        return -(-tokens // self.page_size)


def doublings(first: int, last: int) -> list[int]:
    """Return `first` and its doubles below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def resolve_cpu_options(options: EngineOptions, params: EngineParams) -> EngineOptions:
    """Adapt options to prepared parameters, which may be ShapeDtypeStructs.

    If CPU kernels multiply none of them, `cpu_kernels` is False: the table then has the shapes of XLA's
    products. If they are large, or in several stages, `decode_steps` is 1 by default.
    """
    if not kernel_isa(params):
        return replace(options, cpu_kernels=False)
    target = target_params(params)
    embed_bytes = 0 if target.head is None else tree_bytes(target.embed)  # a step reads few of its rows
    is_light = tree_bytes(params) - embed_bytes <= LIGHT_STEP_BYTES and num_device_groups(params) == 1
    return options if is_light else replace(options, decode_steps=options.decode_steps or 1)


def shared_prefill_row_tokens(
    options: EngineOptions, layers: Sequence[LayerKind], kv_cache_dtype: str, dtype: Any
) -> int:
    """Return the number of tokens of a row of a shared prefill, for a model that computes in `dtype`: few if
    CPU kernels read the keys of all layers."""
    is_short = options.cpu_kernels and can_kernels_read_all_keys(layers, kv_cache_dtype, dtype)
    return SHORT_ROW_TOKENS if is_short else ROW_TOKENS


def can_kernels_read_all_keys(layers: Sequence[LayerKind], kv_cache_dtype: str, dtype: Any) -> bool:
    """Return True if CPU kernels read the keys of all layers of a model that computes in `dtype`."""
    return count_kernel_layers(layers, choose_cache_format(kv_cache_dtype, dtype), dtype) == len(layers)


def engine_shapes(
    options: EngineOptions, sizes: Sizes, layers: Sequence[LayerKind], platform: str, dtype: Any
) -> list[Shape]:
    """Return all shapes of an engine whose model has these layers and computes in `dtype`, by
    `shape_table`. Under the reproducibility contract decodes are as wide as without CPU kernels if these do
    not read all keys: XLA sums the weights of up to four rows' attention in another order."""
    if platform != "cpu":
        return shape_table(options, sizes, can_share_prefill(layers), platform)
    row_tokens = shared_prefill_row_tokens(options, layers, sizes.kv_cache_dtype, dtype)
    if options.reproducible and not can_kernels_read_all_keys(layers, sizes.kv_cache_dtype, dtype):
        options = replace(options, cpu_kernels=False)
    return shape_table(options, sizes, can_share_prefill(layers), platform, row_tokens)


def shape_table(
    options: EngineOptions, sizes: Sizes, can_share: bool, platform: str, row_tokens: int = ROW_TOKENS
) -> list[Shape]:
    """Return all shapes of an engine, sorted by phase.

    Without the reproducibility contract the smallest decode is narrow, and on a CPU the smallest prefill
    short. With CPU kernels both are.

    can_share: True if prompts may share a prefill.
    row_tokens: tokens of a row of a shared prefill.
    """
    num_slots = sizes.max_num_seqs
    canonical = CanonicalShapes.choose(platform, options, sizes)
    may_differ = options.reproducible and not options.batch_invariant_matmul
    min_rows, chunk = MIN_DECODE_ROWS, SMALLEST_CHUNK_TOKENS
    if may_differ:
        min_rows, chunk = canonical.decode_shape.rows, canonical.prefill_shape.tokens
    if options.cpu_kernels and platform == "cpu":
        min_rows, chunk = 1, BUCKET_MULTIPLE_TOKENS
    narrowest = min_rows if options.reproducible else 1
    widths = {narrowest, *doublings(min_rows, max(min_rows, round_up(num_slots, MIN_DECODE_ROWS)))}
    decode = {Shape("decode", width, n) for width in widths for n in (1, options.decode_steps_for(width))}
    prefill = prefill_shapes(options, sizes.max_model_len, can_share, platform, chunk, row_tokens)
    drafts_on_device = options.speculation.model is not None
    verify = verify_shapes(
        num_slots, options.max_draft_tokens, options.tree_nodes, narrowest, drafts_on_device
    )
    required = set(canonical) if options.reproducible else set()
    return sorted({*prefill, *decode, *verify, *required}, key=lambda s: (PHASES.index(s.phase), *s))


def largest_prefill_tokens(options: EngineOptions, max_model_len: int) -> int:
    """Return the number of tokens of the largest prefill. It is at most `max_model_len`, the tokens of a
    request, because shapes are compared on one text."""
    return round_up(min(options.prefill_tokens, max_model_len), SMALLEST_CHUNK_TOKENS)


def prefill_shapes(
    options: EngineOptions,
    max_model_len: int,
    can_share: bool,
    platform: str,
    min_tokens: int = SMALLEST_CHUNK_TOKENS,
    row_tokens: int = ROW_TOKENS,
) -> list[Shape]:
    """Return the shapes of prefills of up to `largest_prefill_tokens` tokens.

    A prompt that is alone has one row; several that share a step have rows of `row_tokens` tokens. The
    smallest prefill has `min_tokens` tokens, or those of a smaller bucket of the options.
    """
    last = largest_prefill_tokens(options, max_model_len)
    edges = doublings(min_tokens, last)
    shared_shapes = [
        Shape("prefill", area // row_tokens, row_tokens)
        for area in shared_prefill_areas(edges, platform, row_tokens)
        if can_share
    ]
    if options.prefill_buckets is not None:
        edges = sorted({min_tokens, last, *(edge for edge in options.prefill_buckets if edge < last)})
    return [Shape("prefill", 1, edge) for edge in edges] + shared_shapes


def shared_prefill_areas(edges: list[int], platform: str, row_tokens: int) -> list[int]:
    """Return the numbers of tokens of prefills that several prompts share, in rows of `row_tokens` tokens.
    They are taken from `edges`; if rows are short, also halfway between two edges."""
    if platform != "cpu":
        return [edge for edge in edges if edge > SMALLEST_CHUNK_TOKENS][-MAX_SHARED_SHAPES:]
    if row_tokens == ROW_TOKENS:
        return [edge for edge in edges if edge >= SMALLEST_CHUNK_TOKENS]
    areas = [edge for edge in edges if edge >= ROW_TOKENS]
    return sorted({*areas, *(3 * area // 2 for area in areas[:-1])})


def can_share_prefill(layers: Iterable[LayerKind]) -> bool:
    """Return True if prompts may be cut into the rows of a shared prefill: the keys of all layers allow it,
    and no layer has recurrent state."""
    return all(
        not layer.state_shapes and layer.attention and layer.attention.can_share_prefill for layer in layers
    )


def max_row_tokens(shapes: Iterable[Shape], prompts: int) -> int:
    """Return the largest number of tokens of a row of prefill for `prompts` prompts at once. Several prompts
    share a step in short rows."""
    shared_rows = [s.tokens for s in shapes if s.rows > 1] if prompts > 1 else []
    return max(shared_rows or [s.tokens for s in shapes])


@cache
def single_prompt_shape(shapes: tuple[Shape, ...], tokens: int) -> Shape:
    """Return the shape of prefill for a single prompt of `tokens` tokens.

    It has the fewest padded tokens, among shapes of one row or of short rows. If no shape holds the prompt,
    it is the shape with the longest row.
    """
    candidates = [s for s in shapes if s.area >= tokens and (s.rows == 1 or s.tokens == SHORT_ROW_TOKENS)]
    longest = max(shapes, key=lambda s: s.tokens)
    return min(candidates, key=lambda s: (s.area, s.rows), default=longest)


def min_row_tokens(shapes: Iterable[Shape]) -> int:
    """Return the smallest number of tokens that a short prompt costs in a step with other prompts."""
    return min([s.tokens for s in shapes if s.rows > 1] or [s.tokens for s in shapes])


def verify_shapes(
    max_num_seqs: int, num_draft_tokens: int, nodes: int, narrowest: int, drafts_on_device: bool = False
) -> list[Shape]:
    """Return the shapes of verifications: of a row's last token and its draft tokens.

    A verification of N tokens has the products of a decode of N rows, so it has at least `narrowest` tokens.
    If rows exceed a shape, they take several steps. The nodes of a draft tree are computed whole, not packed.

    num_draft_tokens: number of draft tokens of a row, at most.
    nodes: number of nodes of a draft tree; 0 without trees.
    drafts_on_device: True if a draft model runs on the device. It drafts for all rows of a shape, so some
        shapes have few.
    """
    if not num_draft_tokens:
        return []
    tokens, num_slots = num_draft_tokens + 1, 1 << (max_num_seqs - 1).bit_length()
    if nodes:
        first = max(1, narrowest // nodes)
        last = max(first, min(num_slots, VERIFY_TOKENS_PER_SLOT * num_slots // nodes))
        return [Shape("verify", rows, tokens) for rows in doublings(first, last)]
    first = max(narrowest, 1 << num_draft_tokens.bit_length())
    areas = doublings(first, max(first, min(VERIFY_TOKENS_PER_SLOT * num_slots, num_slots * first)))
    few = {Shape("verify", min(area // first, num_slots), tokens, area) for area in areas if drafts_on_device}
    return sorted(few | {Shape("verify", min(area, num_slots), tokens, area) for area in areas})


def fits_in_shape(shape: Shape, rows: int, tokens: int, total: int = 0) -> bool:
    """Return True if a shape holds `rows` rows of at most `tokens` tokens each, `total` tokens together."""
    return shape.rows >= rows and shape.tokens >= tokens and shape.area >= total


def smallest_shape(shapes: Iterable[Shape], rows: int, tokens: int, total: int = 0) -> Shape:
    """Return the shape with the fewest padded tokens that holds `rows` rows of at most `tokens` tokens each,
    `total` tokens together. At least one shape must hold them."""
    candidates = [s for s in shapes if fits_in_shape(s, rows, tokens, total)]
    return min(candidates, key=lambda s: (s.area, s.rows * s.tokens, s.tokens))
