"""Reasoning is told from the answer, in whatever pieces the text comes, by the marks that a chat template
has."""

from itertools import pairwise

import pytest
from cases.text.letters import letters
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from duetto.checkpoints.dialects import marks_of
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.openai.tasks import params_for, task_of_body
from duetto.serve.text.tokenizer.reasoning import Reasoning, are_special

THINK = marks_of("</think>")
ANSWER = marks_of("</think> <answer>")
COHERE = marks_of("<|START_THINKING|><|END_THINKING|>")
HARMONY = marks_of("<|channel|>analysis<|message|> <|channel|>final<|message|>")
GEMMA = marks_of("<|channel>thought\\n<channel|>")
GRANITE = marks_of("'Here is my thought process:' and then 'Here is my response:'")
TEXTS = [
    (THINK, "<think>\nmaybe\n</think>\n\nyes", None, "\nmaybe\n", "\n\nyes"),
    (THINK, "\n <think>a</think>b</think>c", None, "a", "b</think>c"),
    (THINK, "maybe</think>yes", True, "maybe", "yes"),
    (THINK, "maybe</think>yes", None, "", "maybe</think>yes"),
    (THINK, "yes <think>no</think>", None, "", "yes <think>no</think>"),
    (THINK, "<think>cut of", None, "cut of", ""),
    (THINK, "cut </thin", True, "cut </thin", ""),
    (THINK, "a < b </ c </think>d", True, "a < b </ c ", "d"),
    (THINK, "<thinking", None, "", "<thinking"),
    (THINK, "<thi", None, "", "<thi"),
    (THINK, "", None, "", ""),
    (ANSWER, "<think>a</think>\n<answer>\nyes\n</answer>", None, "a", "\nyes\n"),
    (ANSWER, "a</think><answer>yes</answer>\n", True, "a", "yes"),
    (ANSWER, "<think>a</think>\n <b>yes</answer>", None, "a", "\n <b>yes</answer>"),
    (ANSWER, "<answer>yes</answer>", None, "", "yes"),
    (ANSWER, "a</think><answer>x</answer> y </answ", True, "a", "x</answer> y </answ"),
    (ANSWER, "a</think><answer>x</answer>y</answer>", True, "a", "x</answer>y"),
    (ANSWER, "a</think>\n<ans", True, "a", "\n<ans"),
    (ANSWER, "<answ", None, "", "<answ"),
    (ANSWER, "plain </answer>", None, "", "plain </answer>"),
    (COHERE, "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", None, "a", "b"),
    (COHERE, "<|START_RESPONSE|>b<|END_RESPONSE|>", None, "", "b"),
    (COHERE, "<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>", None, "a",
     "<|START_ACTION|>[]<|END_ACTION|>"),
    (HARMONY, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", None,
     "a", "b"),
    (HARMONY, "<|channel|>final<|message|>b", None, "", "b"),
    (HARMONY, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f", None, "a",
     "<|start|>assistant<|channel|>commentary to=f"),
    (GEMMA, "<|channel>thought\na\n<channel|>b", None, "a\n", "b"),
    (GRANITE, "Here is my thought process: a. Here is my response: b", None, " a. ", " b"),
]  # fmt: skip


@pytest.mark.parametrize(("marks", "text", "is_open", "thought", "answer"), TEXTS)
@given(data=st.data())
def test_pieces_do_not_matter(data, marks, text, is_open, thought, answer):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    reasoning, found = Reasoning(marks, is_open), []
    for i, j in pairwise(edges):
        found.append(reasoning.take(text[i:j]))
    found.append(reasoning.take("", at_end=True))
    assert "".join(t for t, _ in found) == thought and "".join(a for _, a in found) == answer


def test_nothing_is_held_back_for_longer_than_a_mark():
    reasoning = Reasoning(THINK, True)
    assert reasoning.take("so x <") == ("so x ", "")
    assert reasoning.take(" y") == ("< y", "")
    reasoning = Reasoning(COHERE, False, True)
    assert reasoning.take("so <|END_RESPONSE|> ") == ("", "so ")
    assert reasoning.take("y") == ("", "<|END_RESPONSE|> y")
    reasoning = Reasoning(COHERE)
    assert reasoning.take("<|STAR") == ("", "") and reasoning.take("red") == ("", "<|STARred")


@pytest.mark.parametrize(
    ("marks", "text", "is_open", "answer"),
    [
        (THINK, "<think>a\n</think>\n\nyes\n\n", None, "yes\n\n"),
        (THINK, "a</think>yes", True, "yes"),
        (THINK, "a</think>\n\n\nyes", True, "\nyes"),
        (THINK, "a</think>\n \nyes", True, " \nyes"),
        (THINK, "\n\nyes", None, "\n\nyes"),
        (THINK, "\n\nyes", False, "\n\nyes"),
        (ANSWER, "a</think>\n\nyes", True, "yes"),
        (ANSWER, "a</think>\n<answer>\n\nyes</answer>", True, "\n\nyes"),
    ],
)
@given(data=st.data())
def test_an_answer_under_a_grammar_begins_behind_two_newlines(data, marks, text, is_open, answer):
    """In whatever pieces; a newline that the grammar itself has allowed stays."""
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5))), len(text)]
    reasoning = Reasoning(marks, is_open, is_constrained=True)
    found = [reasoning.take(text[i:j])[1] for i, j in pairwise(edges)]
    assert "".join(found) + reasoning.take("", at_end=True)[1] == answer


@pytest.mark.parametrize(
    ("marks", "prompt", "is_open", "is_marked"),
    [
        (THINK, "a<think>\n", True, None),
        (THINK, "<think>\n\n</think>\n\n", False, None),
        (GEMMA, "<|channel>thought\n", True, None),
        (COHERE, "a<|START_RESPONSE|>", False, True),
        (COHERE, "a<|START_THINKING|><|END_THINKING|>", False, None),
        (COHERE, "a", None, None),
        (THINK, "", None, None),
    ],
)
def test_a_prompt_may_begin_the_reasoning_or_the_answer(marks, prompt, is_open, is_marked):
    own = letters()
    assert Reasoning.after(own, marks, own.encode(prompt)) == Reasoning(marks, is_open, is_marked)


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_are_special_tokens_stay_in_the_text_of_a_chat(special):
    names = ("[THINK]", "[/THINK]")
    own = letters("[THINK][/THINK]", *(AddedToken(name, special=special) for name in names))
    assert are_special(own, marks_of("[/THINK]")) is special
    body = {"messages": [{"role": "user", "content": "a"}]}
    chat = task_of_body("chat", None, body, {}, None)
    assert params_for(chat, Dialect(own), []).skip_special_tokens is not special
    completion = task_of_body("completion", None, {"prompt": "a"}, {}, None)
    assert params_for(completion, Dialect(own), []) is completion.params
    for plain in (None, letters("{{ messages }}")):
        assert params_for(chat, Dialect(plain), []) is chat.params
