"""What a line of a batch may hold: whatever is in it, it has an answer; and what asks for nothing is no
error."""

import json
import string

import pytest
from fakes.batch import MODEL, CheckingEngine, FakeEngine, chat, completion, report_of
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.serve.jobs.batch.answers import AnswerFormatter
from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.lines import (
    LineIdentity,
    RawLine,
    decode_line,
    read_line_identity,
    read_line_task,
)
from duetto.serve.jobs.batch.run import run_batch
from duetto.serve.text.openai.errors import RequestError


def deep(levels: int, inside: str = "1") -> str:
    return "[" * levels + inside + "]" * levels


def failing(error: BaseException) -> FakeEngine:
    """An engine that raises for prompts of one character."""
    engine = FakeEngine()
    plain = engine.add_request

    def add_request(prompt, params, request_id, lora_request=None):
        if len(prompt) == 1:
            raise error
        plain(prompt, params, request_id)

    engine.add_request = add_request
    return engine


def test_a_lines_salt_goes_to_the_engine_with_its_prompt(run):
    engine = FakeEngine()
    plain, prompts = engine.add_request, []

    def add_request(prompt, params, request_id, lora_request=None):
        prompts.append(prompt)
        plain(prompt if isinstance(prompt, list) else prompt["prompt_token_ids"], params, request_id)

    engine.add_request = add_request
    lines = [{"prompt": "x", "cache_salt": "a"}, {"prompt": "x"}, {"prompt": "x", "cache_salt": ""}]
    lines += [completion(prompt="x", cache_salt="b")]
    run("\n".join(map(json.dumps, lines)).encode(), engine)
    assert [one.get("cache_salt") if isinstance(one, dict) else None for one in prompts] == ["a", None, "b"]


# ---------------------------------------------------------------- any exception is the line's

CALLS = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
HOSTILE = {
    "deep stop": f'{{"prompt": "x", "stop": {deep(600)}}}',
    "deep, and allowed elsewhere": f'{{"prompt": "x", "metadata": {deep(150)}}}',
    "deeper than can be read": f'{{"prompt": "x", "stop": {deep(100_000)}}}',
    "deep objects": '{"prompt": "x", "logit_bias": ' + '{"a": ' * 500 + "1" + "}" * 500 + "}",
    "a bad word beyond the vocabulary": '{"prompt": "x", "bad_words": ["~"]}',
    "a number beyond 64 bits": '{"prompt": "x", "id": 123456789012345678901234567890, "seed": 1'
    + "0" * 40
    + "}",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_line_is_answered_and_the_job_goes_on(run, line):
    lines = b'{"prompt": "before"}\n' + line.encode() + b'\n{"prompt": "after"}\n'
    result = run(lines, CheckingEngine(vocabulary=90))
    before, wrong, after = result.answers
    assert result.code == 0 and "text" in before and "text" in after
    assert wrong["line"] == 2 and wrong["error"]["message"]


def test_arguments_that_are_nested_too_deeply_are_read_as_none(run):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": CALLS}]
    (answer,) = run([chat(id="x", messages=messages)]).answers
    assert answer["custom_id"] == "x" and answer["response"]["status_code"] == 200


class OddError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        Exception("WordLevel error: Missing [UNK] token"),
        IndexError("index 300"),
        KeyError("k"),
        OddError("\ud800"),
    ],
)
def test_unexpected_exceptions_are_reported_as_such(run, error, capsys):
    result = run([{"prompt": "x"}, {"prompt": "fine"}, completion(prompt="x")], failing(error))
    wrong, fine, openai = result.answers
    assert wrong["error"]["code"] == "internal_error" and "text" in fine
    assert type(error).__name__ in wrong["error"]["message"]
    assert openai["response"]["status_code"] == 500
    assert openai["response"]["body"]["error"]["type"] == "server_error"
    assert "2 of them with an error (2 internal: the report says where)" in capsys.readouterr().err
    report = report_of(result.out)
    assert report["output"]["errors"] == report["output"]["internal_errors"] == 2
    assert "add_request" in "".join(report["requests"][0]["trace"])


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_errors_unrelated_to_lines_end_the_job(run, error):
    with pytest.raises(type(error)):
        run([{"prompt": "x"}], failing(error))
    assert len(run([{"prompt": "x"}]).answers) == 1


def test_an_engine_that_cannot_start_is_not_the_lines_fault(tmp_path):
    def start():
        raise KeyError("a bug in the loading")

    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    with pytest.raises(KeyError):
        run_batch(start, str(tmp_path / "in"), str(tmp_path / "out"), BatchOptions(progress=False), MODEL)


WORDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "id",
        "stop",
        "seed",
        "n",
        "model",
        "top_logprobs",
        "tools",
        "bad_words",
        "logit_bias",
    ]
    + [
        "role",
        "content",
        "tool_calls",
        "function",
        "arguments",
        "type",
        "text",
        "custom_id",
        "body",
        "max_tokens",
    ]
)
VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text(max_size=4), st.just('[{"a')),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(WORDS | st.text(string.printable, max_size=3), inner, max_size=4),
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=4)


@given(
    fields=OBJECTS,
    message=OBJECTS,
    shape=st.sampled_from(["plain", "plain chat", "/v1/completions", "/v1/chat/completions"]),
)
@settings(max_examples=100, deadline=None)
def test_every_line_is_a_task_or_an_error(fields, message, shape):
    """And its error can be written down, whatever its id is."""
    talk = {"messages": [{"role": "assistant", "content": "a", **message}]}
    asked = {**({"prompt": "a"} if shape in ("plain", "/v1/completions") else talk), **fields}
    value = {"custom_id": "a", "method": "POST", "url": shape, "body": asked} if shape[0] == "/" else asked
    text = json.dumps(value).encode()
    address = LineIdentity(is_openai=False)
    try:
        found = decode_line(RawLine(1, 0, text, len(text), 0), 1 << 20)
        address = read_line_identity(found)
        read_line_task(found, {}, seed=1)
    except RequestError as error:
        assert error.code != "internal_error"
        assert json.loads(AnswerFormatter("salt", "model").format_error(1, address, error))


# ---------------------------------------------------------------- what asks for nothing

NEUTRAL = [
    *({"top_logprobs": 0}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []}),
    *({"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"best_of": 1}, {"length_penalty": 1}),
    *({"length_penalty": 1.0}, {"use_beam_search": False}, {"priority": 0}, {"add_generation_prompt": True}),
    *({"include_reasoning": True}, {"modalities": ["text"]}, {"prompt_cache_key": "k"}, {"verbosity": "low"}),
    *({"store": False}, {"metadata": {"k": "v"}}, {"user": "me"}, {"service_tier": "auto"}, {"echo": False}),
    *({"response_format": {"type": "text"}}, {"suffix": ""}, {"safety_identifier": "s"}, {"stream": False}),
    *({"functions": [], "function_call": "auto"}, {"logit_bias": {}}, {"top_p": None}, {"detokenize": True}),
]  # fmt: skip
ASKING = [
    ({"best_of": 2}, "best_of=2 is not allowed: only 1 is supported"),
    ({"best_of": True}, "best_of=true is not allowed"),
    ({"tool_choice": "required"}, 'tool_choice="required" is not allowed: none or auto without tools'),
    ({"length_penalty": 0.5}, "length_penalty=0.5 is not allowed"),
    ({"include_reasoning": "no"}, 'include_reasoning="no" is not allowed'),
    ({"add_generation_prompt": False}, "add_generation_prompt=false is not allowed"),
    ({"modalities": ["text", "audio"]}, "modalities=a list of 2 is not allowed"),
    ({"use_beam_search": True}, "use_beam_search=true is not allowed"),
    ({"top_logprobs": 2}, "top_logprobs=2 is not allowed: only with logprobs true"),
    ({"model": 7}, "model=7 is not allowed: a string"),
    ({"temprature": 1}, "temprature is not supported in a body; did you mean temperature?"),
    ({"zzz": 1, "yyy": 2}, "zzz is not supported in a body"),
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_asks_for_nothing_changes_nothing(run, fields):
    asked, bare = run([chat(id="a", seed=3, **fields), chat(id="b", seed=3)]).answers
    assert asked["response"]["body"]["choices"] == bare["response"]["body"]["choices"]


def test_neutral_fields_are_accepted_in_both_formats(run):
    neutral = {
        "stream": False,
        "user": "me",
        "best_of": 1,
        "priority": 0,
        "model": "m",
        "use_beam_search": False,
    }
    plain, text = run([{"prompt": "hi", **neutral}, completion(**neutral)]).answers
    assert "text" in plain and text["error"] is None
    wrong = run([{"prompt": "hi", "best_of": 2}], name="o2").answers[0]["error"]
    assert "best_of=2 is not allowed" in wrong["message"]


@pytest.mark.parametrize(("fields", "message"), ASKING, ids=str)
def test_what_would_change_the_answer_is_refused(run, fields, message):
    (wrong,) = run([chat(**fields)]).answers
    assert message in wrong["error"]["message"]


def test_max_completion_tokens_counts_beside_max_tokens(run):
    (answer,) = run([chat(max_tokens=9, max_completion_tokens=2)]).answers
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 2


def test_an_answer_names_the_model_as_its_line_does(run):
    lines = [chat(id="a", model="org/name"), chat(id="b"), completion(id="c", model=None)]
    answers = run(lines, model_name="mine").answers
    assert [a["response"]["body"]["model"] for a in answers] == ["org/name", "mine", "mine"]


def test_cached_tokens_are_reported_without_depending_on_the_cache(run):
    """The fake engine reports other counts with every step, as a cache does under another load."""
    first = run([chat(id=f"{i}") for i in range(6)], in_flight=1)
    again = run([chat(id=f"{i}") for i in range(6)], in_flight=6, name="o2")
    assert first.out.read_bytes() == again.out.read_bytes()
    usage = first.answers[-1]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert report_of(first.out)["requests"][-1]["cached_tokens"] > 0, "what there was is in the report"
