"""Reasoning is told from the answer, in whatever pieces the text comes, by the marks that a chat template
has."""

import time
from itertools import pairwise

import pytest
from cases.text.letters import letters
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from duetto.checkpoints.dialects import find_reasoning_marks
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.openai.tasks import parse_task, task_sampling_params
from duetto.serve.text.tokenizer.reasoning_parser import ReasoningParser, are_marks_special
from duetto.serve.text.tools.formats import TOOL_FORMATS, find_tool_format

THINK = find_reasoning_marks("</think>")
ANSWER = find_reasoning_marks("</think> <answer>")
COHERE = find_reasoning_marks("<|START_THINKING|><|END_THINKING|>")
HARMONY = find_reasoning_marks("<|channel|>analysis<|message|> <|channel|>final<|message|>")
GEMMA = find_reasoning_marks("<|channel>thought\\n<channel|>")
GRANITE = find_reasoning_marks("'Here is my thought process:' and then 'Here is my response:'")
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
    reasoning, found = ReasoningParser(marks, is_open), []
    for i, j in pairwise(edges):
        found.append(reasoning.parse_chunk(text[i:j]))
    found.append(reasoning.parse_chunk("", at_end=True))
    assert "".join(t for t, _ in found) == thought and "".join(a for _, a in found) == answer


def test_nothing_is_held_back_for_longer_than_a_mark():
    reasoning = ReasoningParser(THINK, True)
    assert reasoning.parse_chunk("so x <") == ("so x ", "")
    assert reasoning.parse_chunk(" y") == ("< y", "")
    reasoning = ReasoningParser(COHERE, False, True)
    assert reasoning.parse_chunk("so <|END_RESPONSE|> ") == ("", "so ")
    assert reasoning.parse_chunk("y") == ("", "<|END_RESPONSE|> y")
    reasoning = ReasoningParser(COHERE)
    assert reasoning.parse_chunk("<|STAR") == ("", "") and reasoning.parse_chunk("red") == ("", "<|STARred")


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
    reasoning = ReasoningParser(marks, is_open, is_constrained=True)
    found = [reasoning.parse_chunk(text[i:j])[1] for i, j in pairwise(edges)]
    assert "".join(found) + reasoning.parse_chunk("", at_end=True)[1] == answer


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
    assert ReasoningParser.from_prompt(own, marks, own.encode(prompt)) == ReasoningParser(
        marks, is_open, is_marked
    )


@pytest.mark.parametrize("special", [False, True])
def test_special_token_marks_stay_in_a_chats_text(special):
    names = ("[THINK]", "[/THINK]")
    own = letters("[THINK][/THINK]", *(AddedToken(name, special=special) for name in names))
    assert are_marks_special(own, find_reasoning_marks("[/THINK]")) is special
    body = {"messages": [{"role": "user", "content": "a"}]}
    chat = parse_task("chat", None, body, {}, None)
    assert task_sampling_params(chat, Dialect(own), []).skip_special_tokens is not special
    completion = parse_task("completion", None, {"prompt": "a"}, {}, None)
    assert task_sampling_params(completion, Dialect(own), []) is completion.params
    for plain in (None, letters("{{ messages }}")):
        assert task_sampling_params(chat, Dialect(plain), []) is chat.params


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        (f"maybe {CALL}", "maybe ", CALL),
        (f"maybe {CALL[:30]}", "maybe ", CALL[:30]),
        (f"maybe {CALL}</think>no", f"maybe {CALL}", "no"),
        (f"{CALL} </think>{CALL}", f"{CALL} ", CALL),
        ("a <tool_call></tool_call> is a call", "a <tool_call></tool_call> is a call", ""),
        ("maybe <tool_call>\n", "maybe <tool_call>\n", ""),
    ],
)
def test_a_call_ends_reasoning_that_nothing_else_ends(text, thought, answer):
    pattern = find_tool_format("hermes").compile_call_pattern(["now"])
    for cuts in ([], range(1, len(text)), [9, 17]):
        reasoning = ReasoningParser(THINK, is_open=True, call_pattern=pattern)
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        taken = [*map(reasoning.parse_chunk, pieces), reasoning.parse_chunk("", at_end=True)]
        assert tuple(map("".join, zip(*taken, strict=True))) == (thought, answer)


def test_a_mention_of_calls_is_not_held_back():
    pattern = find_tool_format("qwen3_coder").compile_call_pattern(["now"])
    reasoning = ReasoningParser(THINK, is_open=True, call_pattern=pattern)
    assert reasoning.parse_chunk("a <tool_call>\n<func") == ("a ", "")
    assert reasoning.parse_chunk("y> or <tool") == ("<tool_call>\n<funcy> or ", "")


CALLED = {
    "glm45": "now\n</tool_call>",
    "mistral": "now[ARGS]{}",
    "openai": "functions.now <|constrain|>json<|message|>{}",
    "lfm2": "[now()]<|tool_call_end|>",
    "olmo3": "\nnow()\n</function_calls>",
}


@pytest.mark.parametrize("name", CALLED)
def test_a_mark_before_another_word_is_no_call(name):
    begin = find_tool_format(name).begin
    pattern = find_tool_format(name).compile_call_pattern(["now", "now_or_never"])
    for word in ("nowhere", "functions", "is", "[now_"):
        reasoning = ReasoningParser(THINK, is_open=True, call_pattern=pattern)
        thought, _ = reasoning.parse_chunk(f"a {begin}{word} b")
        assert thought == f"a {begin}{word} b" and reasoning.parse_chunk("", at_end=True) == ("", ""), word
    for cut in range(len(begin + CALLED[name])):
        reasoning, text = ReasoningParser(THINK, is_open=True, call_pattern=pattern), begin + CALLED[name]
        assert reasoning.parse_chunk("a " + text[:cut]) == ("a ", "")
        assert reasoning.parse_chunk(text[cut:], at_end=True) == ("", text)


def test_a_format_without_a_mark_finds_no_call_in_reasoning():
    assert TOOL_FORMATS["hermes"].compile_call_pattern(["now"]).search('{"a": 1} {') is None


def test_a_mark_before_much_white_space_is_read_once():
    """Where it were split into two parts in each way, it would take minutes."""
    pattern, start = find_tool_format("hermes").compile_call_pattern(["now"]), time.process_time()
    assert pattern.search("<tool_call>" + " " * 200_000 + "x") is None
    assert time.process_time() - start < 5
