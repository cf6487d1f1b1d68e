"""Log-probabilities in answers: no entry is lost, each has its own number, and offsets are places in the
text."""

from dataclasses import replace
from typing import Any

import pytest
from cases.text.letters import letters
from hypothesis import given, settings
from hypothesis import strategies as st
from suite.marks import full_if
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from duetto.serve.server.streams import completion_stream
from duetto.serve.text.openai.completion_request import parse_completion
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.openai.text_offsets import TextOffsets
from duetto.serve.text.outputs import CompletionOutput, Logprob, RequestOutput
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

LETTERS = letters()
REPLIES = Replies("demo", LETTERS)
E, A = LETTERS.encode("é"), LETTERS.encode("a")  # two bytes, and one


def scored(*ids: int) -> dict[int, Logprob]:
    """The chosen token and others, the likeliest first; all bytes of "é" have the text U+FFFD."""
    return {i: Logprob(-rank, rank, LETTERS.decode_token(i)) for rank, i in enumerate(ids, 1)}


def output(ids: list[int], *scores: dict[int, Logprob], **fields: Any) -> CompletionOutput:
    return CompletionOutput(0, LETTERS.decode(ids), ids, logprobs=list(scores), **fields)


def logprobs(out: CompletionOutput, form: Any = "completion", **body: Any) -> dict[str, Any]:
    given = {"prompt": "x"} if form == "completion" else {"messages": [{"role": "user", "content": "x"}]}
    asked = parse_completion(form, given | body, {})
    result = RequestOutput("0", None, LETTERS.encode("x"), [replace(out, finish_reason="stop")])
    return completion_stream.build_completion(REPLIES, "1", asked, [result])["choices"][0]["logprobs"]


def test_tokens_with_one_text_are_all_reported():
    first, last = E
    found = logprobs(output([last, *A], scored(first, last, *A), scored(*A, first, last)), logprobs=3)
    assert found["tokens"] == ["\ufffd", "a"] and found["token_logprobs"] == [-2, -1]
    assert found["top_logprobs"] == [
        {f"token_id:{first}": -1, "\ufffd": -2, "a": -3},
        {"a": -1, "\ufffd": -2, f"token_id:{last}": -3},
    ]


def test_a_chosen_token_outside_the_likeliest_is_listed_too():
    first, last = E
    found = logprobs(output([last], scored(first, last)), logprobs=1)
    assert found["tokens"] == ["\ufffd"]
    assert found["top_logprobs"] == [{f"token_id:{first}": -1, "\ufffd": -2}]


def test_tokens_are_named_by_ids_on_request():
    first, last = E
    out = output([last, *A], scored(first, last, *A), scored(*A, first))
    names = {"logprobs": 2, "return_tokens_as_token_ids": True}
    found = logprobs(out, **names)
    assert found["tokens"] == [f"token_id:{last}", f"token_id:{A[0]}"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {f"token_id:{first}": -1, f"token_id:{last}": -2}
    content = logprobs(out, "chat", **names | {"logprobs": True, "top_logprobs": 2})["content"]
    assert [entry["token"] for entry in content] == found["tokens"]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == [*found["top_logprobs"][0]]
    assert content[0]["bytes"] == [0xA9]


@pytest.mark.parametrize(
    ("text", "offsets"), [("aéb", [0, 1, 1, 2]), ("🤗é!", [0, 0, 0, 0, 1, 1, 2]), ("ab", [0, 1])]
)
def test_offsets_are_places_in_the_text(text, offsets):
    ids = LETTERS.encode(text)
    out = output(ids, *(scored(i) for i in ids))
    assert logprobs(out, logprobs=0)["text_offset"] == offsets
    asked = parse_completion("completion", {"prompt": ["x", "y"], "logprobs": 0, "stream": True}, {})
    events = completion_stream.CompletionEvents(REPLIES, "1", asked, [[5], [6]])
    for index in (1, 0):
        pieces = [output([i], scored(i), finish_reason=None) for i in ids]
        told = [next(events._new_choices(replace(one, index=index))) for one in pieces]
        assert [one["logprobs"]["text_offset"] for one in told] == [[place] for place in offsets]


def test_offsets_go_on_behind_tokens_of_another_server():
    asked = parse_completion("completion", {"prompt": "x", "logprobs": 0, "stream": True}, {})
    events = completion_stream.CompletionEvents(REPLIES, "1", asked, [[5]])
    events.skip_outputs([CompletionOutput(0, "é", E)], 1)
    (told,) = events._new_choices(output(A, scored(*A)))
    assert told["logprobs"]["text_offset"] == [1]


@pytest.mark.parametrize("given", ["né", LETTERS.encode("né")], ids=["text", "token ids"])
def test_offsets_of_an_echo_begin_with_the_prompt(given):
    prompt, ids = LETTERS.encode("né"), LETTERS.encode("ü!")
    asked = parse_completion("completion", {"prompt": given, "logprobs": 0, "echo": True}, {})
    out = output(ids, *(scored(i) for i in ids), finish_reason="stop")
    scores = [None, *(scored(i) for i in prompt[1:])]
    result = RequestOutput("0", None, prompt, [out], prompt_logprobs=scores)
    choice = completion_stream.build_completion(REPLIES, "1", asked, [result])["choices"][0]
    assert choice["text"] == "néü!" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3]


def test_choices_of_several_prompts_have_their_own_ids_and_numbers():
    body = {"prompt": ["x", "yz"], "n": 2, "return_token_ids": True}
    asked = parse_completion("completion", body, {})
    outputs = [CompletionOutput(0, "a", A), CompletionOutput(1, "é", E)]
    results = [RequestOutput("0", None, LETTERS.encode(prompt), outputs) for prompt in body["prompt"]]
    reply = REPLIES.reply_body("1", asked.tasks[0], results)
    assert [(one["index"], one["text"], one["prompt_token_ids"]) for one in reply["choices"]] == [
        (2 * i + j, "aé"[j], LETTERS.encode(prompt)) for i, prompt in enumerate(("x", "yz")) for j in (0, 1)
    ]
    counts = {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert list(counts.values()) == [3, 2 * (len(A) + len(E)), 3 + 2 * (len(A) + len(E))]


def pieces(strip: bool) -> Tokenizer:
    words = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "a", "é", "東", "ab"]
    backend = Backend(models.BPE({token: i for i, token in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, {"bos_token": "<s>"})


KINDS = {"bytes": LETTERS, "pieces": pieces(False), "pieces, first space stripped": pieces(True)}


@full_if(lambda kind: kind == "pieces, first space stripped")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_offsets_of_whole_characters_follow_the_text_before(kind, data, skip):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer)), max_size=30))
    places = TextOffsets(tokenizer, skip_special_tokens=skip).push(ids)
    assert places == sorted(places)
    for n, (place, token) in enumerate(zip(places, ids, strict=True)):
        if "\ufffd" not in tokenizer.decode_token(token) and tokenizer.token_to_decode(token, skip):
            assert place == len(tokenizer.decode(ids[:n], skip))


def test_without_a_tokenizer_there_is_no_text():
    assert TextOffsets(None).push([1, 2]) == [0, 0]
