"""Rows of work are cut into calls as full as a shape allows, in time that is linear in the rows."""

from typing import Any, cast

from duetto.serve.engine.core.batch import cut_prompt_rows, group_rows_by_capacity, make_calls
from duetto.serve.engine.core.scheduler_output import ScheduledTokens
from duetto.serve.runtime.compiled.shapes import Shape

SHAPES = (Shape("prefill", 1, 64), Shape("prefill", 4, 16), Shape("prefill", 16, 2))


def test_a_lone_prompt_takes_the_rows_with_least_padding():
    shapes = (
        Shape("prefill", 1, 32),
        Shape("prefill", 1, 64),
        Shape("prefill", 24, 2),
        Shape("prefill", 32, 2),
    )

    def cut(*tokens: int) -> list[tuple[Shape, list[int]]]:
        chunks = [ScheduledTokens(cast("Any", None), 8, n) for n in tokens]
        found = make_calls(shapes, cut_prompt_rows(shapes, chunks))
        return [(shape, [row.start for row in rows.values()]) for shape, rows in found]

    assert cut(30) == [(shapes[0], [8])] and cut(60) == [(shapes[1], [8])]
    assert cut(43) == [(shapes[2], [*range(8, 51, 2)])]
    assert cut(5, 2) == [(shapes[2], [8, 10, 12, 8])]


class Row:
    """A row of work that counts how often its tokens are asked for."""

    asked = 0

    def __init__(self, tokens: int):
        self.tokens = tokens

    @property
    def count(self) -> int:
        Row.asked += 1
        return self.tokens


def sizes(*tokens: int) -> list[list[int]]:
    groups = group_rows_by_capacity(SHAPES, cast("list[Any]", [Row(n) for n in tokens]))
    return [[row.tokens for row in cast("list[Any]", group)] for group in groups]


def test_a_group_fits_a_shape_that_holds_its_longest_row():
    assert sizes() == []
    assert sizes(2, 2, 16, 2, 2) == [[2, 2, 16, 2], [2]]
    assert sizes(2, 64, 2) == [[2], [64], [2]]
    assert sizes(*[2] * 17) == [[2] * 16, [2]]
    assert sizes(*[1] * 5, 16, 16) == [[1] * 5, [16, 16]]


def test_rows_of_different_lengths_share_the_places_of_a_call():
    shapes = Shape("verify", 4, 8, 8), Shape("verify", 8, 8, 16)

    def cut(*tokens: int) -> list[tuple[int, list[int]]]:
        found = make_calls(shapes, cast("list[Any]", [Row(n) for n in tokens]))
        return [
            (shape.area, [row.tokens for row in cast("list[Any]", [*rows.values()])]) for shape, rows in found
        ]

    assert cut(4, 1, 1, 2) == [(8, [4, 1, 1, 2])]
    assert cut(5, 1, 1, 2) == [(16, [5, 1, 1, 2])]
    assert cut(1, 1, 1, 1, 1) == [(16, [1] * 5)]
    assert cut(8, 7, 2, 8, 6) == [(16, [8, 7]), (16, [2, 8, 6])]
    assert cut(*[1] * 9) == [(16, [1] * 8), (8, [1])]


def test_rows_and_places_of_different_shapes_are_not_taken_together():
    shapes = Shape("verify", 2, 8, 16), Shape("verify", 8, 8, 8)
    found = make_calls(shapes, cast("list[Any]", [Row(n) for n in (4, 1, 3, 5, 1)]))
    assert [(shape.area, len(rows)) for shape, rows in found] == [(8, 3), (8, 2)]


def test_packing_reads_each_row_a_few_times():
    Row.asked = 0
    wide = (Shape("decode", 512, 1),)
    assert len(group_rows_by_capacity(wide, cast("list[Any]", [Row(1) for _ in range(512)]))) == 1
    assert Row.asked < 4 * 512
