"""Reasoning is told from the answer, in whatever pieces the text comes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetto.serve.text.reasoning import MARKS, Reasoning

THINK = MARKS[0]
TEXTS = [
    ("<think>\nmaybe\n</think>\n\nyes", None, "\nmaybe\n", "\n\nyes"),
    ("\n <think>a</think>b</think>c", None, "a", "b</think>c"),
    ("maybe</think>yes", True, "maybe", "yes"),
    ("maybe</think>yes", None, "", "maybe</think>yes"),
    ("yes <think>no</think>", None, "", "yes <think>no</think>"),
    ("<think>cut of", None, "cut of", ""),
    ("cut </thin", True, "cut </thin", ""),
    ("a < b </ c </think>d", True, "a < b </ c ", "d"),
    ("<thinking", None, "", "<thinking"),
    ("<thi", None, "", "<thi"),
    ("", None, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "thought", "answer"), TEXTS)
@given(data=st.data())
def test_pieces_do_not_matter(data, text, is_open, thought, answer):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    reasoning, found = Reasoning(THINK, is_open), []
    for i, j in pairwise(edges):
        found.append(reasoning.take(text[i:j]))
    found.append(reasoning.take("", at_end=True))
    assert "".join(t for t, _ in found) == thought and "".join(a for _, a in found) == answer


def test_nothing_is_held_back_for_longer_than_a_mark():
    reasoning = Reasoning(THINK, True)
    assert reasoning.take("so x <") == ("so x ", "")
    assert reasoning.take(" y") == ("< y", "")
