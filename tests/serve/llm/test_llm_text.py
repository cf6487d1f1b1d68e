"""The Python API on text: a model that ships, with its tokenizer and its chat template."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases.requests import SIZES, SMALLEST

from duetto import LLM, SamplingParams
from duetto.serve.engine.startup.model_folder import read_generation_defaults
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError

SEEDED = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
PROMPT = "def add(a, b):\n    "
EOS = 0
END = SamplingParams(
    temperature=0.0, max_tokens=8, logit_bias={EOS: 1000.0}
)  # ends the text as soon as it may


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SMALLEST, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm) -> str:
    """A continuation long enough to stop within."""
    text = llm.generate(PROMPT, SEEDED, use_tqdm=False)[0].outputs[0].text
    assert len(text) > 30
    return text


def test_forms_of_text(llm, plain):
    ids = llm.get_tokenizer().encode(PROMPT)
    for form in (PROMPT, ids, {"prompt": PROMPT}, {"prompt": "another", "prompt_token_ids": ids}):
        for output in [*llm.generate(form, SEEDED), *llm.generate([form, form], SEEDED)]:
            assert output.outputs[0].text == plain
            assert output.prompt_token_ids == ids
            want = form if isinstance(form, str) else form["prompt"] if isinstance(form, dict) else None
            assert output.prompt == want
    mixed = llm.generate([PROMPT, ids, {"prompt": PROMPT}], SEEDED, use_tqdm=False)
    assert [o.outputs[0].text for o in mixed] == [plain] * 3
    with pytest.raises(ValueError, match="empty"):
        llm.generate("")


def test_half_a_surrogate_pair_is_refused_wherever_text_is_read(llm):
    user = [{"role": "user", "content": "\udfff"}]
    bad_word = replace(SEEDED, bad_words=["\ud800"])
    for call in (
        lambda: llm.generate("a\ud800"),
        lambda: llm.log_likelihood("a", "\ud800"),
        lambda: llm.chat(user),
        lambda: llm.generate(PROMPT, bad_word),
    ):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            call()


def test_a_continuation_of_nothing_has_no_score(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.log_likelihood(["def", ""], ["a", "b"])


def test_a_priority_that_cannot_be_compared_is_refused_at_once(llm):
    with pytest.raises(TypeError, match="priority is an integer, not 'high'"):
        llm.generate(PROMPT, SEEDED, priority="high")


def test_text_is_what_the_tokens_say(llm, plain):
    (output,) = llm.generate(PROMPT, replace(SEEDED, logprobs=1), use_tqdm=False)
    (completion,) = output.outputs
    tokenizer = llm.get_tokenizer()
    assert plain == completion.text == tokenizer.decode(completion.token_ids, True)
    decoded = [at[t].decoded_token for t, at in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert decoded == [tokenizer.decode_token(t) for t in completion.token_ids]
    (silent,) = llm.generate(PROMPT, replace(SEEDED, detokenize=False), use_tqdm=False)
    assert silent.outputs[0].text == "" and silent.outputs[0].token_ids == completion.token_ids


def test_streams_of_text(llm, plain):
    assert "".join(str(piece) for piece in llm.stream(PROMPT, SEEDED)) == plain

    async def read(prompt: str) -> str:
        return "".join([piece.text async for piece in llm.astream(prompt, SEEDED)])

    async def both() -> list[str]:
        return list(await asyncio.gather(read(PROMPT), read("import os\n")))

    assert asyncio.run(both()) == [plain, llm.generate("import os\n", SEEDED)[0].outputs[0].text]


def test_stop_strings(llm, plain):
    stop = plain[12:17]
    end = plain.index(stop)
    (output,) = llm.generate(PROMPT, replace(SEEDED, stop=["never seen", stop]), use_tqdm=False)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (plain[:end], "stop", stop)
    assert len(completion.token_ids) < 40
    kept = replace(SEEDED, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(PROMPT, kept, use_tqdm=False)[0].outputs[0].text == plain[: end + len(stop)]
    assert "".join(piece.text for piece in llm.stream(PROMPT, replace(SEEDED, stop=stop))) == plain[:end]
    late = replace(SEEDED, stop=list(set(plain)), min_tokens=20)
    (ended,) = llm.generate(PROMPT, late, use_tqdm=False)
    assert 20 < len(ended.outputs[0].token_ids) < 40 and plain.startswith(ended.outputs[0].text)
    (whole,) = llm.generate(PROMPT, replace(SEEDED, stop="\0"), use_tqdm=False)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == (plain, "length")
    assert whole.outputs[0].stop_reason is None


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "reason"),
    [
        (END, 1, "stop", None),
        (replace(END, min_tokens=3), 4, "stop", None),
        (replace(END, ignore_eos=True), 8, "length", None),
        (replace(END, ignore_eos=True, stop_token_ids=[EOS]), 1, "stop", EOS),
        (replace(END, logit_bias={300: 1000.0}, stop_token_ids=[300]), 1, "stop", 300),
    ],
    ids=["eos", "min_tokens", "ignore_eos", "eos as a stop id", "stop id"],
)
def test_stop_tokens(llm, params, tokens, finish, reason):
    (completion,) = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
    assert len(completion.token_ids) == tokens
    assert (completion.finish_reason, completion.stop_reason) == (finish, reason)
    if tokens == 1:
        assert completion.text == ""
        (kept,) = llm.generate(PROMPT, replace(params, include_stop_str_in_output=True), use_tqdm=False)[
            0
        ].outputs
        special = completion.token_ids[0] == EOS
        assert kept.text == ("" if special else llm.get_tokenizer().decode([300]))


def test_special_tokens_in_the_text(llm):
    shown = replace(END, ignore_eos=True, max_tokens=2)
    texts = [
        llm.generate(PROMPT, replace(shown, skip_special_tokens=skip), use_tqdm=False)[0].outputs[0].text
        for skip in (True, False)
    ]
    assert texts == ["", llm.get_tokenizer().eos_token * 2]


def test_bad_words(llm, plain):
    word = next(w for w in plain.split() if w.isidentifier() and len(llm.get_tokenizer().encode(w)) < 8)
    (output,) = llm.generate(PROMPT, replace(SEEDED, bad_words=[word]), use_tqdm=False)
    assert output.outputs[0].text != plain


def test_chat(llm):
    messages = [{"role": "user", "content": "Add two numbers."}]
    prompt = llm.chat_prompt(messages)
    assert llm.get_tokenizer().decode(prompt).startswith("# Add two numbers.")
    (reply,) = llm.chat(messages, SEEDED, use_tqdm=False)
    assert reply.prompt_token_ids == prompt
    assert reply.outputs[0].text == llm.generate(prompt, SEEDED, use_tqdm=False)[0].outputs[0].text
    other = [{"role": "user", "content": "Sort a list."}, {"role": "assistant", "content": "def sort(x):"}]
    both = llm.chat([messages, other], [SEEDED, replace(SEEDED, max_tokens=3)], use_tqdm=False)
    assert both[0].outputs == reply.outputs and len(both[1].outputs[0].token_ids) == 3
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}"
    own = llm.chat(
        messages, SEEDED, chat_template=template, chat_template_kwargs={"end": "!"}, use_tqdm=False
    )
    assert llm.get_tokenizer().decode(own[0].prompt_token_ids) == "<user>Add two numbers.!"
    for wrong in ([], {"role": "user", "content": "x"}, [{"content": "x"}], "hello"):
        with pytest.raises(ChatTemplateError, match="messages"):
            llm.chat(wrong)


def test_scores_of_text(llm):
    whole, end = llm.log_likelihood([PROMPT + "return a", PROMPT]), llm.log_likelihood(PROMPT, "return a")
    tokenizer = llm.get_tokenizer()
    assert whole[0].token_ids == tokenizer.encode(PROMPT + "return a")[1:]
    assert end[0].token_ids == tokenizer.encode("return a")
    assert all(x <= 0 for score in whole + end for x in score.logprobs)
    assert llm.log_likelihood([PROMPT, PROMPT], ["return a", "return b"])[0].logprobs == pytest.approx(
        end[0].logprobs
    )


def test_default_parameters_are_those_of_the_folder(llm):
    stated = read_generation_defaults(Path(SMALLEST)).sampling
    assert llm.get_default_sampling_params() == SamplingParams.from_dict(stated)
    (output,) = llm.generate(PROMPT, use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


def test_a_progress_bar_is_shown_unless_it_is_not_wanted(llm, capsys):
    llm.generate([PROMPT] * 2, replace(SEEDED, max_tokens=2))
    assert "2/2" in capsys.readouterr().err
    llm.generate([PROMPT] * 2, replace(SEEDED, max_tokens=2), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_wrong_folders_and_tokenizers(tmp_path):
    for options, message in (
        ({"model": tmp_path / "nowhere"}, "nowhere"),
        ({"tokenizer": tmp_path}, "tokenizer .* has no tokenizer.json"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(**options, **SIZES)
    with pytest.raises(TypeError, match="unknown option 'max_len'"):
        LLM(max_len=5)


OFFLINE_SCRIPT = """
from vllm import LLM, SamplingParams

QUESTIONS = ["def main():", "import ", "class Point"]

def main():
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
    llm = LLM(
        model=MODEL, tokenizer=MODEL, dtype="float32", tensor_parallel_size=1, max_model_len=256,
        max_num_seqs=8, max_num_batched_tokens=64, block_size=16, gpu_memory_utilization=0.8,
        enforce_eager=True, trust_remote_code=True,
    )
    outputs = llm.generate(QUESTIONS, params)
    for output in outputs:
        print(f"{output.request_id} {output.prompt!r} -> {output.outputs[0].text!r}")
    talk = [{"role": "user", "content": "Reverse a list"}]
    answers = llm.chat(talk, sampling_params=params, use_tqdm=False)
    print(answers[0].outputs[0].finish_reason, len(answers[0].outputs[0].token_ids))

if __name__ == "__main__":
    main()
"""


def test_a_script_for_vllm_runs_with_its_import_changed(capsys):
    script = OFFLINE_SCRIPT.replace("from vllm import", "from duetto import")
    exec(script, {"__name__": "__main__", "MODEL": SMALLEST})  # noqa: S102
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" -> ")[0] for line in lines[:3]] == [
        "0 'def main():'",
        "1 'import '",
        "2 'class Point'",
    ]
    assert lines[3].split()[0] in ("length", "stop") and len(lines) == 4


def test_a_reply_calls_tools_as_a_server_answers(llm):
    """For any seed, and its calls go on in the conversation."""
    days = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
    tools = [{"type": "function", "function": {"name": "rain", "parameters": days}}]
    messages = [{"role": "user", "content": "rain?"}]
    asked = {"tools": tools, "tool_call_parser": "hermes", "parallel_tool_calls": False}
    choices, calls = [], []
    for seed in range(3):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=60, n=2)
        choices = llm.reply(messages, params, **asked, tool_choice="required")
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
        calls = [call for choice in choices for call in choice["message"]["tool_calls"]]
        assert {call["function"]["arguments"] for call in calls} <= {'{"days": 1}', '{"days": 2}'}
        assert len({call["id"] for call in calls}) == 2
    said = [
        *messages,
        choices[0]["message"],
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"},
    ]
    (choice,) = llm.reply(said, END, **asked, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "stop"
    assert llm.reply(messages, END)[0]["message"]["content"] == ""
    with pytest.raises(ValueError, match="tool_choice.*snow"):
        llm.reply(messages, tools=tools, tool_choice={"type": "function", "function": {"name": "snow"}})
    with pytest.raises(ValueError, match="chat template has no notation"):
        llm.reply(messages, tools=tools)
