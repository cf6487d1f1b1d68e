"""A page's name stands for every token up to its end, and for nothing else."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.kvcache.page_hash import extend_page_hashes, root_hash
from duetto.model.embeddings.prompt import EmbeddingSpan

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def names_of(
    tokens: list[int],
    page_size: int,
    start: bytes = root_hash("model"),
    spans: Sequence[EmbeddingSpan] = (),
) -> list[bytes]:
    names: list[bytes] = []
    extend_page_hashes(names, tokens, len(tokens) // page_size, page_size, start, spans=spans)
    return names


@settings(derandomize=True, database=None, max_examples=200)
@given(TOKENS, TOKENS, st.integers(1, 4))
def test_hashes_are_equal_exactly_where_the_prefixes_are(a, b, page_size):
    left, right = names_of(a, page_size), names_of(b, page_size)
    assert len(left) == len(a) // page_size
    for i, (x, y) in enumerate(zip(left, right, strict=False)):
        end = (i + 1) * page_size
        assert (x == y) == (a[:end] == b[:end])


@settings(derandomize=True, database=None, max_examples=50)
@given(TOKENS, st.integers(1, 4), st.integers(0, 12))
def test_hashes_are_appended_as_tokens_arrive(tokens, page_size, early):
    names: list[bytes] = []
    for pages in (min(early, len(tokens) // page_size), len(tokens) // page_size):
        extend_page_hashes(names, tokens, pages, page_size, root_hash("model"))
    assert names == names_of(tokens, page_size)


def test_a_page_hash_depends_on_the_tokens_before():
    assert len(set(names_of([1, 2] * 5, 2))) == 5


def test_only_full_pages_have_hashes():
    with pytest.raises(AssertionError, match="2 pages of 4 from 7 tokens"):
        extend_page_hashes([], [0] * 7, 2, 4, root_hash("model"))


def test_other_salts_give_other_hashes():
    tokens = list(range(8))
    starts = [
        root_hash("model", "float32"),
        root_hash("model", "bfloat16"),
        root_hash("modelfloat32"),
        root_hash("model"),
    ]
    assert len({names_of(tokens, 4, start)[1] for start in starts}) == len(starts)


def test_large_token_ids_have_different_hashes():
    assert names_of([2**16], 1) != names_of([2**17], 1) != names_of([0], 1)


def test_pages_of_embeddings_are_named_by_content_and_place():
    """The tokens are placeholders, which are equal."""

    def named(*spans: tuple[int, int, bytes]) -> list[bytes]:
        return names_of([7] * 16, 4, spans=[EmbeddingSpan(*span, None) for span in spans])

    text, one = named(), named((5, 6, b"one"))
    assert one[0] == text[0] and not set(one[1:]) & set(text)
    assert one == named((5, 6, b"one")) and len(set(one)) == 4
    others = [named((5, 6, b"two")), named((6, 6, b"one")), named((5, 7, b"one")), named((5, 6, b"on"))]
    assert not set(one[1:]) & {name for other in others for name in other[1:]}
    assert len({other[1] for other in others}) == len(others)
    both = named((5, 2, b"one"), (7, 2, b"two"))
    assert both[1] != named((5, 2, b"two"), (7, 2, b"one"))[1] and both[1] != named((5, 2, b"one"))[1]
    assert both[3] != text[3]  # a page's name covers all pages before it
