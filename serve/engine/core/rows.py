"""Calls of a step: its work is cut into rows, and the rows into calls of compiled shapes."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ...runtime.compiled.shapes import Shape, Sizes, holds, row_tokens, shape_of_one, smallest
from ...runtime.equal_bits.classes import ShapeClasses
from .plan import ScheduledTokens, SchedulerOutput


def prompt_rows(
    shapes: tuple[Shape, ...], chunks: list[ScheduledTokens], sizes: Sizes | None = None
) -> list[ScheduledTokens]:
    """Cut chunks of prompts into rows: short ones for several in a shard; where each shard has one, those of
    the shape that the longest chunk takes alone."""
    if not chunks:
        return []
    is_alone = max(map(len, by_shards(chunks, sizes))) == 1
    longest = max(chunk.count for chunk in chunks)
    tokens = shape_of_one(shapes, longest).tokens if is_alone else row_tokens(shapes, prompts=2)
    return [row for chunk in chunks for row in rows_of(chunk, tokens)]


def rows_of(chunk: ScheduledTokens, tokens: int) -> Iterator[ScheduledTokens]:
    """Cut a chunk into rows of at most `tokens` tokens."""
    end = chunk.start + chunk.count
    for start in range(chunk.start, end, tokens):
        yield ScheduledTokens(chunk.request, start, min(tokens, end - start))


def by_shards(works: Sequence[ScheduledTokens], sizes: Sizes | None) -> list[list[ScheduledTokens]]:
    if sizes is None or sizes.shards == 1:
        return [list(works)]
    found: list[list[ScheduledTokens]] = [[] for _ in range(sizes.shards)]
    for work in works:
        assert work.request.slot is not None
        found[work.request.slot // sizes.max_num_seqs].append(work)
    return found


Call = tuple[Shape, dict[int, ScheduledTokens]]  # and its work by the rows


def calls_of_plan(classes: ShapeClasses, plan: SchedulerOutput, sizes: Sizes) -> Iterator[Call]:
    yield from calls(classes.prefill, prompt_rows(classes.prefill, plan.prefill, sizes), sizes)
    decodes = classes.single_steps if any(work.is_awaiting for work in plan.decode) else classes.decode
    for shape, works in calls(decodes, plan.decode, sizes):
        yield shape.deferred if any(work.is_awaiting for work in works.values()) else shape, works
    yield from calls(classes.verify, plan.verify, sizes)


def calls(shapes: tuple[Shape, ...], works: list[ScheduledTokens], sizes: Sizes | None = None) -> list[Call]:
    """Return the calls that rows take, each of the smallest shape that holds every shard's share of it."""
    each = [groups_of(shapes, own) for own in by_shards(works, sizes)]
    return [call for groups in zip_longest(*each, fillvalue=()) for call in calls_of(shapes, groups)]


def calls_of(shapes: tuple[Shape, ...], groups: Sequence[Sequence[ScheduledTokens]]) -> list[Call]:
    """Return one call for one group of each shard, or a call for each group if no shape holds all."""
    shape = holder(shapes, groups)
    if shape is None:
        parts = ([own if k == i else () for k in range(len(groups))] for i, own in enumerate(groups) if own)
        return [call for part in parts for call in calls_of(shapes, part)]
    return [(shape, numbered(shape, groups))]


def numbered(shape: Shape, groups: Sequence[Sequence[ScheduledTokens]]) -> dict[int, ScheduledTokens]:
    """Number the rows: each shard has `shape.rows` of them."""
    return {shard * shape.rows + i: work for shard, own in enumerate(groups) for i, work in enumerate(own)}


def holder(shapes: tuple[Shape, ...], groups: Sequence[Sequence[ScheduledTokens]]) -> Shape | None:
    """Return the smallest shape that holds each of some groups of rows, or None."""
    tokens = [[work.count for work in own] for own in groups if own]
    least = max(map(len, tokens)), max(map(max, tokens)), max(map(sum, tokens))
    return smallest(shapes, *least) if any(holds(shape, *least) for shape in shapes) else None


def groups_of(shapes: tuple[Shape, ...], works: list[ScheduledTokens]) -> list[list[ScheduledTokens]]:
    """Cut work into groups that one call can take: rows of a shape that holds the longest of them."""
    groups: list[list[ScheduledTokens]] = []
    longest, most, left = 0, 0, 0  # tokens of a row of the last group, rows and more tokens that it may have
    for work in works:
        count = work.count
        if count > longest:
            longest, (most, total) = count, room(shapes, count)
            left = total - sum(w.count for w in groups[-1]) if groups else 0
        if groups and len(groups[-1]) < most and count <= left:
            groups[-1].append(work)
        else:
            groups.append([work])
            longest, (most, left) = count, room(shapes, count)
        left -= count
    return groups


def room(shapes: tuple[Shape, ...], tokens: int) -> tuple[int, int]:
    """Return the rows of at most `tokens` tokens that one call can take, and the tokens of all of them. Both
    are of one shape, since a larger one may be missing."""
    return max(((s.rows, s.area) for s in shapes if s.tokens >= tokens), default=(0, 0))
