"""The batch job with a fake engine: formats, bad lines, resuming, refusals."""

import errno
import hashlib
import io
import json
import os
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.batch import (
    LINES,
    MODEL,
    FakeEngine,
    characters,
    chat,
    completion,
    journal_of,
    report_of,
    runner,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.serve.batch import run as batch_module
from duetto.serve.batch.job import BatchOptions, OrderedStream
from duetto.serve.batch.journal import Header, Journal
from duetto.serve.batch.lines import LineReader
from duetto.serve.batch.run import run_batch
from duetto.serve.host.files import write_whole


@pytest.fixture
def run(tmp_path):
    return runner(tmp_path)


# ---------------------------------------------------------------- formats


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
    assert [sorted(t.values()) for t in scores["top_logprobs"]] == [[-2.0, -1.0]] * 3


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


def test_answers_have_no_line_ends_inside(run):
    result = run([{"prompt": "a", "id": "x\u2028y\u0085z\n\ud7ff"}])
    assert len(result.out.read_text(encoding="utf-8").splitlines()) == 1
    assert result.answers[0]["id"] == "x\u2028y\u0085z\n\ud7ff"


def test_bom_crlf_and_blank_lines_are_no_errors(run):
    answers = run(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \t\n\n{"prompt": "b"}\r\n\n {"prompt": "c"}').answers
    assert [a["line"] for a in answers] == [1, 5, 7] and all("text" in a for a in answers)


@pytest.mark.parametrize("content", [b"", b"\n\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_input_without_lines_makes_an_empty_output_and_no_engine(run, content):
    result = run(content)
    assert result.code == 0 and result.out.read_bytes() == b"" and not result.engine.closed


# ---------------------------------------------------------------- bad lines

PLAIN_ERRORS = [
    (b"{", "invalid_json", "not JSON"),
    (b'{"prompt": "a"} x', "invalid_json", "trailing characters"),
    (b'{"prompt": NaN}', "invalid_json", "not JSON"),
    (b"[" * 100_000, "invalid_json", "nested too deeply"),
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
def test_a_bad_plain_line_is_answered_and_the_job_goes_on(run, line, code, message):
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


def test_a_line_that_cannot_be_read_is_answered_in_the_format_of_the_one_before(run):
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


def test_a_line_of_ten_megabytes_is_answered_without_reading_it_whole(run):
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


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("steps", range(6))
def test_a_job_that_died_goes_on_and_ends_with_the_same_bytes(run, capsys, steps):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(LINES, FakeEngine(die_after=steps), in_flight=4)
    again = run(LINES, in_flight=5)
    assert again.out.read_bytes() == whole
    assert len(again.engine.ran) == 12 - 2 * steps, "what was finished is not computed again"
    assert not journal_of(again.out).exists()


def test_a_journal_cut_anywhere_loses_only_what_was_torn(run):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=4), in_flight=4)
    out = run(LINES, name="whole").out.with_name("out.jsonl")
    content = journal_of(out).read_bytes()
    ends = [i + 1 for i, b in enumerate(content) if b == 10]
    cuts = {0, 1, 17, 40, *ends, *(e - 1 for e in ends), *(e - 9 for e in ends), *(e + 3 for e in ends[:-1])}
    for cut in sorted(cuts):
        journal_of(out).write_bytes(content[:cut])
        again = run(LINES)
        kept = content[:cut].count(b'"e2e"') - (content[:cut].rsplit(b"\n")[-1].count(b'"e2e"'))
        assert again.code == 0 and again.out.read_bytes() == whole, cut
        assert len(again.engine.ran) == 12 - kept, cut
        out.unlink()


@pytest.mark.parametrize("change", ["flip a bit", "zeros at the end", "garbage at the end"])
def test_a_damaged_journal_is_believed_but_for_the_damage(run, change):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=4), in_flight=4)
    path = journal_of(run(LINES, name="whole").out.with_name("out.jsonl"))
    content = bytearray(path.read_bytes())
    third = [i for i, b in enumerate(content) if b == 10][3] + 20
    if change == "flip a bit":
        content[third] ^= 1
    path.write_bytes(bytes(content) + {"f": b"", "z": b"\0" * 99, "g": b"garbage\n"}[change[0]])
    again = run(LINES)
    assert again.out.read_bytes() == whole
    assert len(again.engine.ran) == (12 - 7 if change == "flip a bit" else 12 - 8)


def test_what_was_torn_is_cut_off(tmp_path):
    path, header = tmp_path / "j", Header({"model": "fake"}, "2026-01-01T00:00:00")
    with Journal(path, header) as journal:
        for i in range(3):
            journal.append(i, 10 + i, b"answer", {})
        journal.sync()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\0" * 50)
    with Journal(path, Header({"model": "fake"}, "2027-02-02T00:00:00")) as journal:
        assert journal.count == 2 and journal.header == header
        assert (journal.has(1, 11), journal.has(1, 10), journal.has(2, 12)) == (True, False, False)
        assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:3])
        journal.append(2, 12, b"answer", {})
        journal.sync()
    assert path.read_bytes() == content


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


def test_a_finished_job_is_not_run_again(run, capsys):
    first = run(LINES)
    before = first.out.stat().st_mtime_ns
    again = run(LINES)
    assert again.code == 0 and not again.engine.ran and "already complete" in capsys.readouterr().err
    assert again.out.stat().st_mtime_ns == before


def test_the_time_of_a_chat_template_is_that_of_the_first_start(run, monkeypatch):
    """It is kept in whole seconds, so the template finds no microseconds."""
    engine, seen = FakeEngine(), []
    monkeypatch.setattr(
        engine, "add_request", lambda *a: (seen.append(a[0]), FakeEngine.add_request(engine, *a))
    )
    assert run([{"messages": [{"role": "user", "content": "a"}]}], engine).code == 0
    assert characters().decode(seen[0]) == "[user]a000000"


@pytest.mark.parametrize("point", ["report", "journal"])
def test_a_kill_while_finishing_is_repaired(run, monkeypatch, point):
    def dying(path, *rest, **named):
        if path.name.endswith("report.json") == (point == "report"):
            raise KeyboardInterrupt
        write_whole(path, *rest, **named)

    with monkeypatch.context() as patch:
        if point == "report":
            patch.setattr(batch_module, "write_whole", dying)
        else:
            patch.setattr(Journal, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(LINES)
    out = run(LINES, name="whole").out.with_name("out.jsonl")
    assert out.exists() and journal_of(out).exists()
    again = run(LINES)
    assert again.code == 0 and not again.engine.ran and not journal_of(out).exists()
    assert (
        again.out.read_bytes() == out.with_name("whole").read_bytes()
        and report_of(out)["output"]["lines"] == 13
    )


# ---------------------------------------------------------------- refusals


def refused(result, capsys) -> str:
    assert result.code == 1 and not result.engine.ran
    return capsys.readouterr().err


def test_another_jobs_journal_is_refused_field_by_field(run, capsys):
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=1))
    capsys.readouterr()
    said = refused(run(LINES, model={"model": "real", "max_model_len": "64", "dtype": "f32"}, seed=3), capsys)
    for difference in ("  model: was fake, is real", "  dtype: was not set, is f32", "  seed: was 0, is 3"):
        assert difference in said
    assert "max_model_len" not in said and "holds answers of another job" in said
    said = refused(run(LINES[:-1]), capsys)
    assert "  input: was " in said and said.count("was") == 1
    assert run(LINES).code == 0


def test_a_journal_without_answers_is_no_hindrance(run):
    with pytest.raises(RuntimeError):
        run(LINES[:3], FakeEngine(die_after=0))
    assert run(LINES[:3], model={"model": "real"}).code == 0


def test_another_jobs_output_is_refused_and_left_alone(run, capsys):
    out = run(LINES).out
    before = out.read_bytes()
    capsys.readouterr()
    said = refused(run(LINES, model={**MODEL, "model": "real"}), capsys)
    assert "is the result of another job" in said and "  model: was fake, is real" in said
    out.write_bytes(before + b"mine\n")
    assert "was changed since it was finished" in refused(run(LINES), capsys)
    assert out.read_bytes() == before + b"mine\n" and not journal_of(out).exists()
    out.unlink()
    assert run(LINES, model={**MODEL, "model": "real"}).code == 0


def test_a_file_that_is_not_ours_is_refused_but_an_empty_one_taken(run, capsys, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    assert "exists and is not a result of this command" in refused(run(LINES), capsys)
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    (tmp_path / "out.jsonl").write_text("")
    assert run(LINES).code == 0
    (tmp_path / "o2.journal").write_text("precious")
    assert "exists and is not a journal" in refused(run(LINES, name="o2"), capsys)
    assert (tmp_path / "o2.journal").read_text() == "precious"


def test_an_output_that_appears_meanwhile_is_not_replaced(run, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    result = run(LINES, FakeEngine(on_step=lambda engine: out.write_text("precious")))
    said = capsys.readouterr().err
    assert (
        result.code == 1 and out.read_text() == "precious" and "13 of 13 lines are answered and kept" in said
    )
    out.unlink()
    assert run(LINES, FakeEngine(die_after=0)).code == 0


@pytest.mark.parametrize("name", ["no/such/folder/out", "folder", "/dev/null"])
def test_places_that_cannot_be_written_are_refused_in_a_sentence(run, capsys, tmp_path, name):
    (tmp_path / "folder").mkdir()
    said = refused(run(LINES, name=name), capsys)
    assert said.count("\n") == 1 and name.split("/")[-1].removesuffix("out") in said
    assert Path("/dev/null").is_char_device()


def test_a_missing_input_is_refused_in_a_sentence(capsys, tmp_path):
    for name in (tmp_path / "none", tmp_path):
        code = run_batch(FakeEngine, str(name), str(tmp_path / "out"), BatchOptions(progress=False), MODEL)
        assert code == 1 and f"duetto batch: {name}: " in capsys.readouterr().err


def test_wrong_defaults_are_refused(run, capsys):
    assert "top_p=3.0 is not allowed" in refused(run(LINES, sampling={"top_p": 3.0}), capsys)


def test_a_model_that_cannot_be_loaded_costs_nothing(tmp_path, run, capsys):
    def missing():
        raise ValueError("config.json is not there")

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]))
    code = run_batch(missing, str(source), str(tmp_path / "out.jsonl"), BatchOptions(progress=False), MODEL)
    said = capsys.readouterr().err
    assert (
        code == 1
        and "the model cannot be loaded: config.json is not there" in said
        and "Traceback" not in said
    )
    assert run(LINES[:1]).code == 0


def test_the_second_process_on_an_output_is_refused(run, capsys, tmp_path):
    with Journal(tmp_path / "out.jsonl.journal", Header({}, "2026-01-01T00:00:00")):
        assert "another process is working on" in refused(run(LINES), capsys)
    assert run(LINES).code == 0


def test_an_input_that_changes_is_noticed(run, capsys, tmp_path):
    def change(engine):
        with open(tmp_path / "in.jsonl", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"X")

    lines = [{"prompt": f"p{i}", "id": f"{i:020}"} for i in range(500)]
    result = run(lines, FakeEngine(on_step=change), in_flight=2)
    assert result.code == 1 and "the input was changed while the job ran" in capsys.readouterr().err
    assert not result.out.exists()
    again = run(lines)
    assert again.code == 0 and [a["id"] for a in again.answers] == [x["id"] for x in lines]


def test_lines_added_while_the_job_runs_belong_to_the_next(run, tmp_path):
    def add(engine):
        with open(tmp_path / "in.jsonl", "ab") as file:
            file.write(b'{"prompt": "late"}\n')

    assert len(run(LINES, FakeEngine(on_step=add), in_flight=2).answers) == len(LINES)


def test_a_full_disk_is_one_sentence_and_loses_nothing(run, capsys, tmp_path):
    whole = run(LINES, name="whole").out.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
        result = run(LINES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert result.code == 1 and os.strerror(errno.EFBIG) in said and "run the same command again" in said
    assert journal_of(result.out).read_bytes().endswith(b"\n"), "no torn record stays behind"
    again = run(LINES)
    assert again.out.read_bytes() == whole and 0 < len(again.engine.ran) < 12


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_keeps_the_step_and_says_how_to_go_on(run, capsys, signum, code):
    def interrupt(engine):
        if engine.steps == 3:
            os.kill(os.getpid(), signum)

    handlers = signal.getsignal(signum)
    result = run(LINES, FakeEngine(on_step=interrupt), in_flight=4)
    assert result.code == code and result.engine.closed and signal.getsignal(signum) == handlers
    said = capsys.readouterr().err
    assert "interrupted" in said and "lines are answered and kept in" in said and "same command again" in said
    again = run(LINES)
    assert again.code == 0 and len(again.engine.ran) == 12 - 6


# ---------------------------------------------------------------- streams


def test_standard_input_and_output(run, capfd, monkeypatch, tmp_path):
    whole = run(LINES, name="whole").out.read_bytes()
    content = (tmp_path / "in.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    capfd.readouterr()
    seen = []
    code = run_batch(
        FakeEngine, "-", "-", BatchOptions(progress=False, in_flight=3), MODEL, summary=seen.append
    )
    assert code == 0 and capfd.readouterr().out.encode() == whole and seen[0]["steps"] > 0


def test_a_pipe_as_input(tmp_path, run):
    whole = run(LINES, name="whole").out.read_bytes()
    pipe, content = tmp_path / "pipe", (tmp_path / "in.jsonl").read_bytes()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    out = tmp_path / "out"
    assert run_batch(FakeEngine, str(pipe), str(out), BatchOptions(progress=False), MODEL) == 0
    writer.join()
    assert out.read_bytes() == whole


def test_early_answers_wait_for_their_turn(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        stream = OrderedStream(file.fileno())
        for index in (2, 1):
            stream.append(index, 0, b"%d" % index, {})
        stream.sync()
        assert (tmp_path / "out").read_bytes() == b""
        stream.append(0, 0, b"0", {})
        stream.sync()
    assert (tmp_path / "out").read_bytes() == b"0\n1\n2\n"


def test_a_closed_pipe_as_output_is_for_the_command_to_tell():
    read, write = os.pipe()
    os.close(read)
    stream = OrderedStream(write)
    stream.append(0, 0, b"x", {})
    with pytest.raises(BrokenPipeError):
        stream.sync()
    os.close(write)


def test_progress_is_shown_on_standard_error(tmp_path, capsys):
    (tmp_path / "in").write_text(json.dumps(LINES[0]))
    assert run_batch(FakeEngine, str(tmp_path / "in"), str(tmp_path / "out"), BatchOptions(), MODEL) == 0
    said = capsys.readouterr()
    assert "1/1" in said.err and "tokens/s" in said.err and said.out == ""
