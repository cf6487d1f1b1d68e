"""Batches of a step: scheduled tokens are cut into rows, rows are grouped into calls of compiled shapes, and
the rows of a call are written into arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ....kvcache.pages import Batch
from ....sampling.params import NO_TOKEN
from ...runtime.compiled.batch_arrays import empty_batch, fill_row
from ...runtime.compiled.shapes import (
    Shape,
    Sizes,
    fits_in_shape,
    max_row_tokens,
    single_prompt_shape,
    smallest_shape,
)
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.steps.output import NO_PROMPT_INPUTS, PromptInputs, PromptResult
from .scheduler_output import ScheduledTokens, SchedulerOutput


def cut_prompt_rows(
    shapes: tuple[Shape, ...], chunks: list[ScheduledTokens], sizes: Sizes | None = None
) -> list[ScheduledTokens]:
    """Cut chunks of prompts into rows.

    If a shard has several chunks, rows are short, so that the chunks share calls. Otherwise a row has the
    tokens of the shape for the longest chunk alone.
    """
    is_alone = max(map(len, split_by_shard(chunks, sizes))) == 1
    longest = max(chunk.count for chunk in chunks)
    tokens = single_prompt_shape(shapes, longest).tokens if is_alone else max_row_tokens(shapes, prompts=2)
    return [row for chunk in chunks for row in chunk.cut(tokens)]


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


# makes the input of a call from its rows, by row number
MakeBatch = Callable[[Sizes, Shape, Mapping[int, ScheduledTokens]], Any]
ShapeCall = tuple[Shape, dict[int, ScheduledTokens]]  # a shape, and scheduled tokens by row number


def split_into_calls(
    classes: ShapeClasses, scheduler_output: SchedulerOutput, sizes: Sizes
) -> Iterator[ShapeCall]:
    """Yield the calls of a step: prefill, decode, then verification."""
    if scheduler_output.prefill:
        rows = cut_prompt_rows(classes.prefill, scheduler_output.prefill, sizes)
        yield from make_calls(classes.prefill, rows, sizes)
    if scheduler_output.decode:
        is_awaiting = any(scheduled.is_awaiting_mask for scheduled in scheduler_output.decode)
        shapes = classes.single_step_shapes if is_awaiting else classes.decode
        yield from make_calls(shapes, scheduler_output.decode, sizes)
    if scheduler_output.verify:
        yield from make_calls(classes.verify, scheduler_output.verify, sizes)


def make_calls(
    shapes: tuple[Shape, ...], scheduled_rows: list[ScheduledTokens], sizes: Sizes | None = None
) -> list[ShapeCall]:
    """Return the calls of some rows. Each has the smallest shape that holds the rows of every shard."""
    if not scheduled_rows:
        return []
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


def make_batch(sizes: Sizes, shape: Shape, scheduled_rows: Mapping[int, ScheduledTokens]) -> Batch:
    """Return the batch of a call: its rows by their numbers, all other rows empty."""
    batch = empty_batch(sizes, shape, sizes.max_num_seqs)
    for row, scheduled in scheduled_rows.items():
        write_row(batch, row, scheduled, sizes.max_num_seqs)
    return batch


def write_row(batch: Batch, row: int, scheduled: ScheduledTokens, shard_slots: int) -> None:
    """Write a row into a batch: the tokens that the host knows, then draft tokens.

    The device has, or samples, the rest of the row's `count` tokens. `shard_slots` is the number of slots of
    a shard.
    """
    request = scheduled.request
    assert request.slot is not None
    known = request.tokens[scheduled.start : scheduled.end]
    tokens = [*known, *scheduled.draft_tokens]
    fill_row(batch, row, tokens, scheduled.start, request.pages, request.slot % shard_slots)
    batch.count[row] = scheduled.count
    if scheduled.embedding_rows is not None:
        batch.embeddings.rows[row, : scheduled.count] = scheduled.embedding_rows


def make_prompt_inputs(
    shape: Shape, scheduled_rows: Mapping[int, ScheduledTokens], shards: int = 1
) -> PromptInputs:
    """Return the inputs of the programs that score and pool the prompts of a prefill, if a row asks."""
    if shape.phase != "prefill":
        return NO_PROMPT_INPUTS
    inputs: dict[PromptResult, Any] = {}
    rows = shards * shape.rows
    if scored := {row: scheduled for row, scheduled in scheduled_rows.items() if scheduled.scored_positions}:
        following = inputs["prompt"] = np.full((rows, shape.tokens), NO_TOKEN, np.int32)
        for row, scheduled in scored.items():
            positions = scheduled.scored_positions
            tokens = scheduled.request.prompt[positions.start : positions.stop]
            following[row, scheduled.score_columns(positions)] = tokens
    if any(scheduled.request.pooler is not None for scheduled in scheduled_rows.values()):
        count = inputs["pooled"] = np.zeros(rows, np.int32)
        for row, scheduled in scheduled_rows.items():
            count[row] = scheduled.count
    return inputs
