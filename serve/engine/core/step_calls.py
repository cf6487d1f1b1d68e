"""Calls of a step: scheduled tokens are cut into rows, and rows are grouped into calls of compiled shapes."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ...runtime.compiled.shapes import (
    Shape,
    Sizes,
    fits_in_shape,
    max_row_tokens,
    single_prompt_shape,
    smallest_shape,
)
from ...runtime.equal_bits.classes import ShapeClasses
from .scheduler_output import ScheduledTokens, SchedulerOutput


def cut_prompt_rows(
    shapes: tuple[Shape, ...], chunks: list[ScheduledTokens], sizes: Sizes | None = None
) -> list[ScheduledTokens]:
    """Cut chunks of prompts into rows.

    If a shard has several chunks, rows are short, so that the chunks share calls. Otherwise a row has the
    tokens of the shape for the longest chunk alone.
    """
    if not chunks:
        return []
    is_alone = max(map(len, split_by_shard(chunks, sizes))) == 1
    longest = max(chunk.count for chunk in chunks)
    tokens = single_prompt_shape(shapes, longest).tokens if is_alone else max_row_tokens(shapes, prompts=2)
    return [row for chunk in chunks for row in cut_chunk(chunk, tokens)]


def cut_chunk(scheduled: ScheduledTokens, max_tokens: int) -> Iterator[ScheduledTokens]:
    """Cut a chunk into rows of at most `max_tokens` tokens."""
    end = scheduled.start + scheduled.count
    for start in range(scheduled.start, end, max_tokens):
        yield ScheduledTokens(scheduled.request, start, min(max_tokens, end - start))


def split_by_shard(
    scheduled_rows: Sequence[ScheduledTokens], sizes: Sizes | None
) -> list[list[ScheduledTokens]]:
    """Return the rows of each shard."""
    if sizes is None or sizes.shards == 1:
        return [list(scheduled_rows)]
    shards: list[list[ScheduledTokens]] = [[] for _ in range(sizes.shards)]
    for scheduled in scheduled_rows:
        assert scheduled.request.slot is not None
        shards[scheduled.request.slot // sizes.max_num_seqs].append(scheduled)
    return shards


ShapeCall = tuple[Shape, dict[int, ScheduledTokens]]  # a shape, and scheduled tokens by row number


def split_into_calls(
    classes: ShapeClasses, scheduler_output: SchedulerOutput, sizes: Sizes
) -> Iterator[ShapeCall]:
    """Yield the calls of a step: prefill, decode, then verification."""
    yield from make_calls(
        classes.prefill, cut_prompt_rows(classes.prefill, scheduler_output.prefill, sizes), sizes
    )
    decodes = (
        classes.single_step_shapes
        if any(scheduled.is_awaiting_mask for scheduled in scheduler_output.decode)
        else classes.decode
    )
    yield from make_calls(decodes, scheduler_output.decode, sizes)
    yield from make_calls(classes.verify, scheduler_output.verify, sizes)


def make_calls(
    shapes: tuple[Shape, ...], scheduled_rows: list[ScheduledTokens], sizes: Sizes | None = None
) -> list[ShapeCall]:
    """Return the calls of some rows. Each has the smallest shape that holds the rows of every shard."""
    groups_by_shard = [
        group_rows_by_capacity(shapes, shard_rows) for shard_rows in split_by_shard(scheduled_rows, sizes)
    ]
    return [
        call
        for groups in zip_longest(*groups_by_shard, fillvalue=())
        for call in make_group_calls(shapes, groups)
    ]


def make_group_calls(
    shapes: tuple[Shape, ...], groups: Sequence[Sequence[ScheduledTokens]]
) -> list[ShapeCall]:
    """Return one call for a group of rows from each shard; one call for each group if no shape holds all."""
    shape = smallest_holding_shape(shapes, groups)
    if shape is None:
        parts = (
            [group if k == i else () for k in range(len(groups))] for i, group in enumerate(groups) if group
        )
        return [call for part in parts for call in make_group_calls(shapes, part)]
    return [(shape, rows_by_number(shape, groups))]


def rows_by_number(shape: Shape, groups: Sequence[Sequence[ScheduledTokens]]) -> dict[int, ScheduledTokens]:
    """Return the rows by number. The numbers of shard i begin at i * shape.rows."""
    return {
        shard * shape.rows + i: scheduled
        for shard, group in enumerate(groups)
        for i, scheduled in enumerate(group)
    }


def smallest_holding_shape(
    shapes: tuple[Shape, ...], groups: Sequence[Sequence[ScheduledTokens]]
) -> Shape | None:
    """Return the smallest shape that holds every group of rows, or None."""
    tokens = [[scheduled.count for scheduled in group] for group in groups if group]
    needed = max(map(len, tokens)), max(map(max, tokens)), max(map(sum, tokens))
    return smallest_shape(shapes, *needed) if any(fits_in_shape(shape, *needed) for shape in shapes) else None


def group_rows_by_capacity(
    shapes: tuple[Shape, ...], scheduled_rows: list[ScheduledTokens]
) -> list[list[ScheduledTokens]]:
    """Split rows into groups that each fit one call, of a shape that holds the longest row of the group."""
    groups: list[list[ScheduledTokens]] = []
    # Of the last group: tokens of its longest row, and the rows and tokens that it can still hold.
    longest = max_rows = tokens_left = 0
    for scheduled in scheduled_rows:
        count = scheduled.count
        if count > longest:
            longest, (max_rows, total) = count, call_capacity(shapes, count)
            tokens_left = total - sum(row.count for row in groups[-1]) if groups else 0
        if groups and len(groups[-1]) < max_rows and count <= tokens_left:
            groups[-1].append(scheduled)
        else:
            groups.append([scheduled])
            longest, (max_rows, tokens_left) = count, call_capacity(shapes, count)
        tokens_left -= count
    return groups


def call_capacity(shapes: tuple[Shape, ...], tokens: int) -> tuple[int, int]:
    """Return the rows and the total tokens that one call can hold, if a row has `tokens` tokens.

    Both numbers belong to one shape, since a larger shape may be missing.
    """
    return max(((s.rows, s.area) for s in shapes if s.tokens >= tokens), default=(0, 0))
