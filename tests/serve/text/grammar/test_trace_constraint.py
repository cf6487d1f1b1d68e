"""The constraint of trace replay by itself."""

import numpy as np

from duetto.serve.text.grammar.trace_constraint import TraceConstraint

V = 70


def allowed(masks: np.ndarray) -> list[list[int]]:
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_each_position_allows_its_own_token():
    constraint = TraceConstraint([5, 69, 5], output_start=2, V=V)
    for i, token in enumerate([5, 69, 5]):
        constraint.advance([1, 1, 5, 69, 5][: 2 + i])
        assert allowed(constraint.token_masks()) == [[token]] and constraint.failure is None


def test_draft_tokens_are_followed_while_they_match_the_trace():
    constraint = TraceConstraint([5, 69, 7, 8], output_start=0, V=V)
    constraint.advance([5])
    assert allowed(constraint.token_masks([69, 7])) == [[69], [7], [8]]
    assert allowed(constraint.token_masks([69, 9, 8])) == [[69], [7]]
    assert constraint.choose_draft([-1, -1], 2) == (69, 7) and constraint.choose_draft([], 9) == (69, 7, 8)


def test_nothing_is_limited_behind_the_end():
    constraint = TraceConstraint([5], output_start=0, V=V)
    constraint.advance([5])
    assert len(allowed(constraint.token_masks())[0]) >= V and not constraint.choose_draft([3], 4)
