"""A page's name stands for every token up to its end, and for nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.kvcache.page_hash import extend, root

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def names_of(tokens: list[int], page_size: int, start: bytes = root("model")) -> list[bytes]:
    names: list[bytes] = []
    extend(names, tokens, len(tokens) // page_size, page_size, start)
    return names


@settings(derandomize=True, database=None, max_examples=200)
@given(TOKENS, TOKENS, st.integers(1, 4))
def test_names_are_equal_exactly_where_the_prefixes_are(a, b, page_size):
    left, right = names_of(a, page_size), names_of(b, page_size)
    assert len(left) == len(a) // page_size
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        end = (i + 1) * page_size
        assert (x == y) == (a[:end] == b[:end])


@settings(derandomize=True, database=None, max_examples=50)
@given(TOKENS, st.integers(1, 4), st.integers(0, 12))
def test_names_grow_with_the_tokens(tokens, page_size, early):
    names: list[bytes] = []
    for pages in (min(early, len(tokens) // page_size), len(tokens) // page_size):
        extend(names, tokens, pages, page_size, root("model"))
    assert names == names_of(tokens, page_size)


def test_a_page_of_the_same_tokens_has_another_name_elsewhere():
    assert len(set(names_of([1, 2] * 5, 2))) == 5


def test_only_full_pages_have_names():
    with pytest.raises(AssertionError, match="2 pages of 4 from 7 tokens"):
        extend([], [0] * 7, 2, 4, root("model"))


def test_salts_separate():
    tokens = list(range(8))
    starts = [root("model", "float32"), root("model", "bfloat16"), root("modelfloat32"), root("model")]
    assert len({names_of(tokens, 4, start)[1] for start in starts}) == len(starts)


def test_large_token_ids_are_told_apart():
    assert names_of([2**16], 1) != names_of([2**17], 1) != names_of([0], 1)
