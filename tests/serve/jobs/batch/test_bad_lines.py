"""Lines of a batch that cannot be run: each is answered in its format, and the job goes on."""

import hashlib
import io
import json
from dataclasses import replace

import pytest
from fakes.batch import (
    FakeEngine,
    characters,
    chat,
    completion,
    report_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.serve.jobs.batch.lines import LineReader
from duetto.serve.text.outputs import CompletionOutput

PLAIN_ERRORS = [
    (b"{", "invalid_json", "not JSON"),
    (b'{"prompt": "a"} x', "invalid_json", "trailing characters"),
    (b'{"prompt": NaN}', "invalid_json", "not JSON"),
    (b"[" * 100_000, "invalid_json", "nested too deeply"),
    (b'{"prompt": "a", "n": 1, "n": 2}', "repeated_key", "the key 'n' is not allowed more than once"),
    (
        b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}',
        "repeated_key",
        "the key 'role' is not allowed more than once in an object of the line",
    ),
    (b'{"prompt": "\xff"}', "invalid_utf8", "byte 12 of the line, 0xff, is not UTF-8"),
    (b"[1]", "invalid_line", "must be a JSON object, not a list of 1"),
    (b"{}", "invalid_line", "one of prompt, prompt_token_ids and messages; it has none"),
    (b'{"prompt": "a", "messages": []}', "invalid_line", "it has prompt and messages"),
    (b'{"prompt": 3}', "invalid_request", "prompt=3 is not allowed: a string or a list of token ids"),
    (b'{"prompt": [1, true]}', "invalid_request", "prompt=a list of 2 is not allowed"),
    (b'{"prompt": ["a", "b"]}', "invalid_request", "one prompt a line"),
    (b'{"prompt_token_ids": "a"}', "invalid_request", "a list of token ids"),
    (b'{"prompt": ""}', "invalid_request", "the prompt has 0 tokens"),
    (b'{"prompt": "' + b"a" * 65 + b'"}', "invalid_request", "the prompt has 65 tokens, 1 to 64 are allowed"),
    (b'{"prompt": "a", "id": 1.5}', "invalid_request", "id=1.5 is not allowed"),
    (b'{"prompt": "a", "temprature": 1}', "invalid_request", "unknown sampling parameter 'temprature'"),
    (b'{"prompt": "a", "temperature": "hot"}', "invalid_request", "temperature='hot'"),
    (b'{"prompt": "a", "temperature": -1}', "invalid_request", "temperature=-1 is not allowed"),
    (
        b'{"prompt": "a", "seed": [1, 2]}',
        "invalid_request",
        "seed=(1, 2) is not allowed: one seed, or a list",
    ),
    (b'{"prompt": "a", "n": 129}', "invalid_request", "n=129 is not allowed: 1 to 128"),
    (b'{"prompt": "a", "chat_template_kwargs": {}}', "invalid_request", "only beside messages"),
    (b'{"messages": "hi"}', "invalid_request", "messages must be a list"),
    (b'{"messages": [{"role": "user"}]}', "invalid_request", r"messages[0].content must be a string"),
    (
        b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"now": 1}}',
        "invalid_request",
        "other variables of the template",
    ),
]
BODY_ERRORS = [
    (completion(stream=True), "stream=true is not allowed"),
    (completion(echo=True), "echo=true is not allowed"),
    (completion(seed=[1, "x"], n=2), "seed=[1, 'x']"),
    (completion(best_of=2), "best_of=2 is not allowed: only 1 is supported"),
    (completion(tools=[{}]), "tools=a list of 1 is not allowed"),
    (completion(prompt_logprobs=1), "prompt_logprobs is not supported"),
    (completion(messages=[]), "messages is not supported"),
    (completion(top_p=2), "top_p=2"),
    (completion(prompt=None), "prompt=null is not allowed"),
    (chat(prompt="a"), "prompt is not supported"),
    (chat(logprobs=3), "logprobs=3 is not allowed: true or false"),
    (chat(top_logprobs=3), "top_logprobs=3 is not allowed: only with logprobs true"),
    (chat(messages=[{"role": 1, "content": "a"}]), "messages[0].role must be a string"),
    (chat() | {"method": "GET"}, 'method="GET" is not allowed: "POST"'),
    (chat() | {"url": "/v1/embeddings"}, 'url="/v1/embeddings" is not allowed'),
    (chat() | {"custom_id": 7}, "custom_id=7 is not allowed: a string"),
    (chat() | {"body": []}, "body=a list of 0 is not allowed"),
    (chat() | {"extra": 1}, "extra is unknown beside body, custom_id, method, url"),
    ({"custom_id": "a", "prompt": "hi"}, "prompt is unknown beside"),
]


@pytest.mark.parametrize(("line", "code", "message"), PLAIN_ERRORS)
def test_a_bad_plain_line_gets_an_error_answer(run, line, code, message):
    result = run(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    before, wrong, after = result.answers
    assert "text" in before and "text" in after and result.code == 0
    assert wrong["line"] == 2 and wrong["error"]["code"] == code and message in wrong["error"]["message"]


@pytest.mark.parametrize(("line", "message"), BODY_ERRORS)
def test_a_bad_openai_line_is_answered_in_its_format(run, line, message):
    wrong, fine = run([line, completion(id="fine")]).answers
    assert message in wrong["error"]["message"] and wrong["error"]["line"] == 1
    assert wrong["custom_id"] == line["custom_id"] and wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["message"] == wrong["error"]["message"]
    assert fine["response"]["status_code"] == 200


def test_unreadable_lines_are_answered_in_the_previous_format(run):
    answers = run(b"{\n" + json.dumps(chat()).encode() + b"\n{\n" + b'{"prompt": "a"}\n{').answers
    assert ["custom_id" in a for a in answers] == [False, True, True, False, False]
    assert answers[2]["custom_id"] is None and answers[2]["error"]["line"] == 3


def test_an_id_counts_once_even_on_a_bad_line(run):
    lines = [
        completion(id="a", n=0),
        completion(id="a"),
        {"prompt": "a", "id": "b"},
        {"prompt": "a", "id": "b"},
    ]
    answers = run([*lines, {"prompt": "a", "id": 0}, {"prompt": "a", "id": "0"}]).answers
    codes = [a["error"] and a["error"]["code"] for a in answers[:2]] + [
        a.get("error", {}).get("code") for a in answers[2:]
    ]
    assert codes == ["invalid_request", "duplicate_id", None, "duplicate_id", None, None]


def test_chat_needs_a_template_that_accepts_the_messages(run):
    lines = [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}]
    none = run(lines, FakeEngine(characters(None))).answers
    assert none[0]["error"] == {
        "code": "chat_template_error",
        "message": "the model has no chat template; give a prompt instead of messages",
    }
    refusing = run(lines, FakeEngine(characters("{{ raise_exception('no') }}")), name="o2").answers
    assert refusing[0]["error"]["message"] == "the chat template failed: TemplateError: no"
    assert "text" in none[1] and "text" in refusing[1]


class SurrogateEngine(FakeEngine):
    """Answers one prompt with half of a surrogate pair."""

    def completion(self, index, prompt, params):
        answer = super().completion(index, prompt, params)
        return answer if len(prompt) < 9 else CompletionOutput(index, "\ud83d", [1], finish_reason="stop")


@pytest.mark.parametrize("line", [{"prompt": "a long one", "id": 7}, completion(prompt="a long one", id="7")])
def test_a_line_whose_answer_cannot_be_written_has_an_error(run, line):
    lines = [{"prompt": "a"}, line, {"prompt": "b"}]
    result, again = run(lines, SurrogateEngine()), run(lines, SurrogateEngine(), "again.jsonl")
    before, wrong, after = result.answers
    assert result.code == 0 and "text" in before and "text" in after
    assert wrong["error"]["code"] == "internal_error" and "surrogates" in wrong["error"]["message"]
    assert wrong.get("response", {}).get("status_code", 500) == 500
    assert wrong["id"] == 7 or wrong["custom_id"] == "7"
    assert result.out.read_bytes() == again.out.read_bytes()
    about = report_of(result.out)["requests"][1]
    assert about["line"] == 2 and "UnicodeEncodeError" in about["trace"][-1]


def test_a_line_of_ten_megabytes_gets_an_error_answer(run):
    huge = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    wrong, fine = run(huge + b'\n{"prompt": "a"}').answers
    assert wrong["error"]["code"] == "line_too_long" and "text" in fine
    assert wrong["error"]["message"] == f"the line has {len(huge) + 1} bytes, at most {8 << 20} are allowed"


@given(
    content=st.binary(max_size=60) | st.text("ab \n\r", max_size=60).map(str.encode), limit=st.integers(1, 20)
)
@settings(max_examples=300, deadline=None)
def test_reading_lines_equals_splitting(content, limit):
    reader = LineReader(io.BytesIO(content + b"appended later"), len(content), limit)
    found = [(line.number, line.index, line.text) for line in reader]
    raw = content.removesuffix(b"\n").split(b"\n")
    texts = [
        None if len(x) > limit else x.removeprefix(b"\xef\xbb\xbf" * (i == 0)) for i, x in enumerate(raw)
    ]
    kept = [(n, x) for n, x in enumerate(texts, 1) if x is None or x.strip()]
    assert found == [(n, i, x) for i, (n, x) in enumerate(kept)]
    assert reader.sha256.hexdigest() == hashlib.sha256(content).hexdigest()


class NanEngine(FakeEngine):
    """An engine whose model computes NaN for requests of one token."""

    def completion(self, index, prompt, params):
        found = super().completion(index, prompt, params)
        return found if len(prompt) > 1 else replace(found, finish_reason="error", stop_reason="NaN, it says")


def test_a_line_with_nan_gets_an_error_alone(run):
    lines = [
        {"prompt": "ab"},
        {"prompt": "a", "id": "x"},
        completion(prompt="a", id="y"),
        completion(prompt="ab"),
    ]
    found = run(lines, engine=NanEngine())
    assert (
        found.code == 0 and "text" in found.answers[0] and found.answers[3]["response"]["status_code"] == 200
    )
    assert found.answers[1] == {
        "id": "x",
        "line": 2,
        "error": {"code": "nan_logits", "message": "NaN, it says"},
    }
    assert found.answers[2]["custom_id"] == "y" and found.answers[2]["response"]["status_code"] == 500
    assert found.answers[2]["error"] == {"code": "nan_logits", "message": "NaN, it says", "line": 3}
