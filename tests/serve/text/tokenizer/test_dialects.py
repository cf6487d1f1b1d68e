"""Chat templates of families: rendered as Transformers renders them, and their marks found again in what they
write."""

import json

import pytest
from cases.text.dialects import (
    ANSWER,
    ASKED,
    CALLED,
    FAMILIES,
    FILE,
    TOKENS,
    TOOL,
    by_transformers,
    renderings,
    template,
)
from cases.text.letters import letters

from duetto.checkpoints.dialects import REASONING, TOOL_CALLS, find_reasoning_marks, find_tool_call_marks
from duetto.serve.text.tokenizer.chats.chat import ChatTemplateError, render_chat
from duetto.serve.text.tokenizer.reasoning_parser import ReasoningParser

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
LETTERS = letters()
THINKING = {"enable_thinking": True, "thinking": True}


def test_templates_of_families_are_rendered_as_transformers_renders_them():
    found = {}
    for name, source, given in renderings():
        try:
            found[name] = render_chat(source, **TOKENS, **given)
        except ChatTemplateError as error:
            found[name] = {"error": str(error).removeprefix("the chat template failed: ")}
    assert found == GOLDEN


@pytest.mark.extras
def test_the_transformers_installed_renders_the_same():
    pytest.importorskip("transformers")
    assert {name: by_transformers(source, **given) for name, source, given in renderings()} == GOLDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_says_how_its_model_reasons_and_calls(family):
    calls, marks = find_tool_call_marks(template(family)), find_reasoning_marks(template(family))
    assert (calls and calls.name, marks and marks.begin) == FAMILIES[family][:2]


def written(family: str, message: dict, **options) -> tuple[str, str]:
    """The prompt for a message of the assistant, and what the template writes for it."""
    source, options = template(family), {**TOKENS, **THINKING, **options}
    prompt = render_chat(source, [ASKED], **options)
    whole = render_chat(source, [ASKED, message], add_generation_prompt=False, **options)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix(FAMILIES[family].ends)


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if family.calls != "deepseek_v31"]
)
def test_reasoning_and_calls_are_found_in_what_the_template_writes(family):
    prompt, text = written(family, ANSWER)
    calls, marks = find_tool_call_marks(template(family)), find_reasoning_marks(template(family))
    if marks is not None:
        reasoning = ReasoningParser.from_prompt(LETTERS, marks, LETTERS.encode(prompt))
        assert [part.strip() for part in reasoning.parse_chunk(text, at_end=True)] == [
            "it will",
            "Yes, 3 mm.",
        ]
    _, text = written(family, CALLED, tools=[TOOL])
    before, begin, call = text.partition(calls.begin)
    inside, end, after = call.partition(calls.end) if calls.end else (call, "", "")
    assert begin and end == calls.end and "rain" in inside and "Malmö" in inside
    assert "rain" not in before and after.strip() == ""


def test_no_format_hides_another():
    for find, rows in ((find_reasoning_marks, REASONING), (find_tool_call_marks, TOOL_CALLS)):
        assert all(find(" ".join(row.template_substrings)) is row for row in rows)
        assert find("no marks") is None


@pytest.mark.parametrize(
    ("source", "calls", "begin"),
    [
        ("{{ '<｜tool▁calls▁begin｜>' }}```json {{ x.split('</think>') }}", "deepseek_v3", "<think>"),
        ("<|python_tag|> ipython {{- '\"parameters\": ' }}", "llama3_json", None),
        ("<|python_start|>", "llama4_json", None),
        ("<function_calls> <think>", "olmo3", "<think>"),
        ("<tool_calls></think><answer>", "hunyuan_a13b", "<think>"),
    ],
)
def test_marks_of_other_templates_are_found(source, calls, begin):
    found, marks = find_tool_call_marks(source), find_reasoning_marks(source)
    assert (found.name, marks and marks.begin) == (calls, begin)
