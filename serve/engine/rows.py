"""How a step's work is cut into rows, the rows into calls of compiled shapes, and what a call is told."""

from collections.abc import Iterator, Sequence

from ...kvcache.pages import Batch
from ..programs.compile import Programs, fill
from ..programs.shapes import Shape, row_tokens, smallest
from .plan import Work
from .scores import tell_following


def prompt_rows(shapes: tuple[Shape, ...], chunks: list[Work]) -> list[Work]:
    """Chunks of prompts in rows: few of one that is alone, short ones of several."""
    tokens = row_tokens(shapes, len(chunks))
    return [row for chunk in chunks for row in rows_of(chunk, tokens)]


def rows_of(chunk: Work, tokens: int) -> Iterator[Work]:
    """A chunk in rows of at most `tokens` tokens."""
    end = chunk.start + chunk.count
    for start in range(chunk.start, end, tokens):
        yield Work(chunk.request, start, min(tokens, end - start))


def calls(shapes: tuple[Shape, ...], works: list[Work]) -> list[tuple[Shape, list[Work]]]:
    """The calls that rows of work take, each of the smallest shape that holds it."""
    groups = groups_of(shapes, works)
    return [(holder(shapes, [work.count for work in rows]), rows) for rows in groups]


def holder(shapes: tuple[Shape, ...], tokens: list[int]) -> Shape:
    """The smallest shape of rows with so many tokens each."""
    return smallest(shapes, len(tokens), max(tokens), sum(tokens))


def groups_of(shapes: tuple[Shape, ...], works: list[Work]) -> list[list[Work]]:
    """Work cut into what one call can take: rows of a shape that holds the longest of them."""
    groups: list[list[Work]] = []
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
    """Rows of at most so many tokens that one call can take, and tokens of all of them: those of one shape,
    since a larger one may lack."""
    return max(((s.rows, s.area) for s in shapes if s.tokens >= tokens), default=(0, 0))


def batch_of(programs: Programs, shape: Shape, works: Sequence[Work]) -> Batch:
    """The host batch of a step: of each row the tokens that are known, and its guesses."""
    batch = programs.empty_batch(shape, programs.sizes.max_num_seqs)
    for row, work in enumerate(works):
        request, slot = work.request, work.request.slot
        assert slot is not None
        known = request.tokens[work.start : work.start + work.count]
        fill(batch, row, [*known, *work.guesses], work.start, request.pages, slot)
        batch.count[row] = work.count  # those beyond the known ones are the slot's own to find
        tell_following(batch, row, work)
    return batch
