"""How a step's work is cut into rows, and the rows into calls of compiled shapes."""

from collections.abc import Iterator

from ..programs.shapes import Shape, row_tokens, smallest
from .scheduler import Work


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
    return [(smallest(shapes, len(rows), max(w.count for w in rows)), rows) for rows in groups]


def groups_of(shapes: tuple[Shape, ...], works: list[Work]) -> list[list[Work]]:
    """Work cut into what one call can take: rows of a shape that holds the longest of them."""
    groups: list[list[Work]] = []
    longest, most = 0, 0  # tokens of a row of the last group, and rows that one of such rows may have
    for work in works:
        if work.count > longest:
            longest, most = work.count, most_rows(shapes, work.count)
        if groups and len(groups[-1]) < most:
            groups[-1].append(work)
        else:
            groups.append([work])
            longest, most = work.count, most_rows(shapes, work.count)
    return groups


def most_rows(shapes: tuple[Shape, ...], tokens: int) -> int:
    """Rows of so many tokens that one call can take."""
    return max((s.rows for s in shapes if s.tokens >= tokens), default=0)
