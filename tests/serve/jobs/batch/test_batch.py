"""The batch job with a fake engine: both formats of lines, what their answers hold, and the report."""

import hashlib

import pytest
from fakes.batch import (
    LINES,
    FakeEngine,
    characters,
    chat,
    completion,
    report_of,
)

from duetto.lora.request import LoRARequest


def test_plain_lines_are_answered_in_their_order(run):
    lines = [{"prompt": f"p{i}", "id": f"n{i}", "max_tokens": i + 1} for i in range(9)]
    result = run(lines)
    assert [a["id"] for a in result.answers] == [f"n{i}" for i in range(9)]
    assert result.engine.ran != sorted(result.engine.ran) and result.engine.closed
    first = result.answers[0]
    assert set(first) == {"id", "line", "text", "finish_reason", "stop_reason", "usage"}
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert [a["line"] for a in result.answers] == list(range(1, 10))


def test_ids_are_optional_and_may_be_numbers(run):
    answers = run([{"prompt": "a"}, {"prompt": "a", "id": 1}, {"prompt": "a", "id": "1"}]).answers
    assert ["id" in a for a in answers] == [False, True, True]
    assert [a.get("id") for a in answers] == [None, 1, "1"]


def test_prompts_as_text_ids_and_messages(run):
    tokenizer = characters()
    spoken = [{"role": "user", "content": "hi"}]
    options = {"seed": 1, "max_tokens": 4}
    lines = [
        {"prompt": "hi", **options},
        {"prompt": tokenizer.encode("hi"), **options},
        {"prompt_token_ids": tokenizer.encode("hi"), **options},
        {"messages": spoken, **options},
        {"messages": spoken, "chat_template_kwargs": {"tail": "!"}, **options},
    ]
    answers = run(lines).answers
    assert answers[0]["text"] == answers[1]["text"] == answers[2]["text"] != answers[3]["text"]
    assert [a["usage"]["prompt_tokens"] for a in answers] == [2, 2, 2, 14, 15]


def test_openai_completions(run):
    result = run(
        [completion(id="x", n=2, seed=3, logprobs=2, user="me", stream=False, stop=None, max_tokens=3)]
    )
    (answer,) = result.answers
    assert answer["custom_id"] == "x" and answer["error"] is None
    assert answer["id"].startswith("batch_req_") and answer["response"]["status_code"] == 200
    reply = answer["response"]["body"]
    assert reply["object"] == "text_completion" and reply["model"] == "any" and reply["created"] == 0
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["choices"][0]["text"] != reply["choices"][1]["text"]
    counts = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert reply["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    scores = reply["choices"][0]["logprobs"]
    assert "".join(scores["tokens"]) == reply["choices"][0]["text"] and scores["text_offset"] == [0, 1, 2]
    assert scores["token_logprobs"] == [-9999.0] * 3
    assert [sorted(t.values()) for t in scores["top_logprobs"]] == [[-9999.0, -2.0, -1.0]] * 3


def test_openai_chat(run):
    (answer,) = run(
        [chat(id="y", max_completion_tokens=2, logprobs=True, top_logprobs=1, model="any")]
    ).answers
    reply = answer["response"]["body"]
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == choice["message"]["content"]
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    assert [len(e["top_logprobs"]) for e in entries] == [1, 1]


def test_lengths_that_are_not_given_are_those_of_each_api(run):
    plain, text, talk = run([{"prompt": "hi"}, completion(id="1"), chat(id="2")]).answers
    assert plain["usage"]["completion_tokens"] == 16
    assert text["response"]["body"]["usage"]["completion_tokens"] == 16
    assert talk["response"]["body"]["usage"]["completion_tokens"] == 20
    short = run(
        [{"prompt": "hi"}, chat(id="2"), chat(id="3", max_tokens=2)], name="o2", sampling={"max_tokens": 5}
    )
    assert short.answers[0]["usage"]["completion_tokens"] == 5
    counts = [a["response"]["body"]["usage"]["completion_tokens"] for a in short.answers[1:]]
    assert counts == [5, 2]


def test_plain_choices_and_logprobs(run):
    several, scored = run(
        [{"prompt": "a", "n": 3, "max_tokens": 2}, {"prompt": "a", "logprobs": 1, "max_tokens": 2}]
    ).answers
    assert [c["index"] for c in several["choices"]] == [0, 1, 2] and "text" not in several
    assert len(scored["token_ids"]) == len(scored["logprobs"]) == 2
    assert scored["logprobs"][0]["1"] == {
        "logprob": -1.0,
        "rank": 1,
        "decoded_token": characters().decode_token(1),
    }


def test_a_model_without_tokenizer_runs_on_token_ids(run):
    ids, text = run(
        [{"prompt": [1, 2], "max_tokens": 3}, {"prompt": "a"}], FakeEngine(tokenizer=None)
    ).answers
    assert len(ids["token_ids"]) == 3 and ids["text"] == ""
    assert text["error"]["message"] == "the model has no tokenizer: give the prompt as token ids"


def test_seeds_come_from_the_job_and_the_line(run):
    lines = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 5}, {"prompt": "a", "seed": 5}]
    first = [a["text"] for a in run(lines).answers]
    again = [a["text"] for a in run(lines, name="o2").answers]
    other = [a["text"] for a in run(lines, name="o3", seed=1).answers]
    assert first == again and len(set(first)) == 3 and first[2] == first[3]
    assert other[0] != first[0] and other[2:] == first[2:]


def test_each_choice_of_a_line_may_have_a_seed(run):
    lines = [{"prompt": "a", "n": 2, "seed": [8, 3]}, *({"prompt": "a", "seed": seed} for seed in (8, 3))]
    several, *alone = run(lines).answers
    bodies = [completion(prompt="a", n=2, seed=[8, 3]), completion(id="b", n=2, seed=[8])]
    asked, refused = run(bodies, name="o2").answers
    texts = [answer["text"] for answer in alone]
    assert texts == [choice["text"] for choice in several["choices"]] and len(set(texts)) == 2
    assert texts == [choice["text"] for choice in asked["response"]["body"]["choices"]]
    assert "seed=(8,) is not allowed: one seed, or a list of as many as n=2" in str(refused)


def test_answers_have_no_line_ends_inside(run):
    result = run([{"prompt": "a", "id": "x\u2028y\u0085z\n\ud7ff"}])
    assert len(result.out.read_text(encoding="utf-8").splitlines()) == 1
    assert result.answers[0]["id"] == "x\u2028y\u0085z\n\ud7ff"


def test_bom_crlf_and_blank_lines_are_no_errors(run):
    answers = run(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n\n{"prompt": "b"}\r\n\n {"prompt": "c"}').answers
    assert [a["line"] for a in answers] == [1, 5, 7] and all("text" in a for a in answers)


@pytest.mark.parametrize("content", [b"", b"\n\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_empty_input_makes_an_empty_output_without_engine(run, content):
    result = run(content)
    assert result.code == 0 and result.out.read_bytes() == b"" and not result.engine.closed


def test_only_so_many_lines_are_in_flight(run):
    result = run([{"prompt": f"p{i}"} for i in range(50)], in_flight=7)
    assert result.engine.most == 7


def test_the_report_stands_beside_the_output(run):
    out = run(LINES).out
    report = report_of(out)
    assert report["fingerprint"]["model"] == "fake" and len(report["fingerprint"]["input"]) == 64
    assert report["output"] == {
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        "lines": 13,
        "errors": 1,
        "internal_errors": 0,
    }
    assert report["run"]["steps"] > 0 and len(report["requests"]) == 13
    assert report["requests"][0] | {"cached_tokens": 0} == {
        "line": 1,
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
        "cached_tokens": 0,
        "queued": 0.1,
        "ttft": 0.2,
        "tpot": 0.01,
        "e2e": 0.5,
        "preemptions": 0,
    }
    assert report["requests"][11] == {"line": 12, "error": "invalid_line"}


def test_a_lines_model_may_be_an_adapter(run):
    """In either format; another name is the model's own."""
    sql = LoRARequest("sql", 1, "/sql")
    lines = [
        {"prompt": "a", "model": "sql"},
        {"messages": [{"role": "user", "content": "a"}], "model": "sql"},
        {"prompt": "a", "model": "other"},
        {"prompt": "a"},
        {
            "custom_id": "x",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a", "model": "sql"},
        },
        {"prompt": "a", "model": 5},
    ]
    done = run(lines, adapters={"sql": sql})
    assert done.engine.adapters == [sql, sql, None, None, sql]
    assert done.answers[-1]["error"]["message"] == "model=5 is not allowed: a string"
    assert done.answers[4]["response"]["body"]["model"] == "sql"


def test_the_engine_knows_how_many_lines_remain(run):
    """All at its start; then those behind what it has: five of twelve lines, of which two end in each step;
    the last is wrong."""
    lines = [{"prompt": f"p{i}"} for i in range(11)] + [{"wrong": 1}]
    assert run(lines, in_flight=5).engine.to_come == [12, 7, 5, 3, 1, 0, 0]
