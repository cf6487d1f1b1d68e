"""Trees of guesses: their shape, and what is no tree."""

from collections.abc import Callable

import pytest

from duetto.sampling.token_tree import TokenTree


def test_a_tree_knows_its_shape():
    tree = TokenTree.from_widths((2, 1))
    assert tree.parents == (-1, 0, 0, 1, 2)
    assert tree.depths.tolist() == [0, 1, 1, 2, 2] and tree.depth == 2
    assert tree.children.tolist() == [[1, 2], [3, -1], [4, -1], [-1, -1], [-1, -1]]
    assert tree.paths.tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 1, 3], [0, 2, 4]]
    assert TokenTree.from_paths([(0,), (1,), (0, 0), (1, 0)]) == tree
    assert TokenTree.from_widths(()).depth == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: TokenTree(()),
        lambda: TokenTree((0, 0)),
        lambda: TokenTree((-1, 1)),
        lambda: TokenTree.from_paths([(0, 0)]),
        lambda: TokenTree.from_paths([(1,)]),
    ],
)
def test_what_is_no_tree_is_refused(make: Callable[[], TokenTree]):
    with pytest.raises(ValueError, match="is not allowed"):
        make()
