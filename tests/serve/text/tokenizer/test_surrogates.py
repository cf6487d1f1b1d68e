"""JSON text without halves of surrogate pairs."""

import json

import pytest

from duetto.serve.text.tokenizer.chats.chat import render_chat
from duetto.serve.text.tokenizer.surrogates import find_open_escape, replace_lone_surrogates


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),
        (r'"\uD83D \uDE00"', r'"\ufffd \ufffd"'),
        (r'"\ude00\ud83d\ude00"', r'"\ufffd\ud83d\ude00"'),
        (r'"\\ud83d \\\ud83d \u00e9"', r'"\\ud83d \\\ufffd \u00e9"'),
        ("\ud83d\ude00 \ud83d \ude00é", "😀 \ufffd \ufffdé"),
    ],
)
def test_pairs_are_kept_and_lone_ones_replaced(text, mended):
    assert replace_lone_surrogates(text) == mended and mended.encode()


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (r"ab\ud83d", 2), (r"ab\ud83d\ude0", 2), (r"ab\ud83", 2), ("ab\\", 2), (r"ab\\ud83d", 9),
        (r"ab\\\ud83d", 4), (r"ab\ud83d\n", 10), (r"ab\ude00", 8), (r"ab\ud83d\ude00", 14), ("ab", 2),
    ],
)  # fmt: skip
def test_an_escape_is_open_while_it_may_be_completed(text, begin):
    assert find_open_escape(text) == begin


def test_arguments_that_a_client_sends_have_pairs_only():
    call = {"function": {"name": "f", "arguments": r'{"x": "\ud83d \ud83d\ude00"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    text = render_chat(template, messages, bos_token=None, eos_token=None)
    assert json.loads(text) == {"x": "\ufffd 😀"}
