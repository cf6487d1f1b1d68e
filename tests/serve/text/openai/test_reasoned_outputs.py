"""Answers under a grammar come after the reasoning, in every notation of it; and how much a model reasons is
a variable of its chat template."""

import json
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
from cases.text.dialects import ASKED, TOKENS, template
from cases.text.letters import letters
from suite.marks import full_if
from tokenizers import AddedToken

from duetto import SamplingParams
from duetto.checkpoints.dialects import REASONING, ReasoningMarks
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.grammar import grammar_cache
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.openai.responses import parse_response_task
from duetto.serve.text.openai.tasks import parse_task, task_sampling_params, tokenize_prompt
from duetto.serve.text.outputs import CompletionOutput
from duetto.serve.text.tokenizer.chats.chat import EFFORTS, render_chat
from duetto.serve.text.tokenizer.tokenizer import Tokenizer
from duetto.serve.text.tools.lark import SPECIAL_TEXT
from duetto.serve.text.tools.reply_parser import ReasoningDelta, ReplyParser, join_part_texts
from duetto.serve.text.tools.stream_reader import TextDelta

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WANTED = {
    "json": ({"json": X}, '{"x": 1}', '{"y": 1}'),
    "regex": ({"regex": "[0-9]/[0-9]"}, "3/4", "3-4"),
    "choice": ({"choice": ["yes", "no"]}, "no", "maybe"),
    "grammar": ({"grammar": 'start: "a" b\nb: "c"+'}, "acc", "ab"),
}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROWS = [pytest.param(row, id=row.begin.strip()[:20] + row.template_substrings[-1]) for row in REASONING]


def reasoning_model(marks: ReasoningMarks, is_special: bool) -> Tokenizer:
    """A tokenizer with a chat template of these marks, which may be special tokens."""
    source = "{{ messages[0].content }}{# " + " ".join(marks.template_substrings) + " #}"
    texts = {
        part
        for text in (marks.begin, marks.end, *marks.answer_begins, marks.answer_end)
        for part in SPECIAL_TEXT.findall(text)
    }
    tokens = [AddedToken(text, special=True) for text in sorted(texts)] if is_special else []
    return letters(source, *tokens, AddedToken("<eos>", special=True))


@lru_cache(1)
def grammars_of(words: Tokenizer) -> GrammarCompiler:
    """The grammars of a tokenizer: each of them starts a process."""
    return GrammarCompiler(words, len(words), [words.token_id("<eos>")])


def accepts(words: Tokenizer, asked: StructuredOutputsParams, text: str) -> bool:
    """True if a grammar allows a text and an end after it."""
    end = words.token_id("<eos>")
    constraint = grammars_of(words).compile_constraint(asked, 0)
    constraint.advance(words.encode(text))
    bits = np.unpackbits(constraint.token_masks()[0].view(np.uint8), bitorder="little")
    return constraint.failure is None and bool(bits[end])


@full_if(lambda marks, is_special: not is_special and marks is not REASONING[0])
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("marks", ROWS)
def test_a_grammar_begins_after_the_reasoning(marks, is_special):
    pytest.importorskip("llguidance")
    words = reasoning_model(marks, is_special)
    dialect, opening = Dialect(words), marks.answer_begins[0] if marks.answer_begins else ""
    assert dialect.reasoning_marks == marks
    for own, right, wrong in WANTED.values():
        asked = StructuredOutputsParams(**own)
        for prompt, before in (("a", marks.begin), (f"a{marks.begin}", "")):
            ids = words.encode(prompt)
            grammar = dialect.grammar_with_reasoning(asked, ids)
            thought = f"{before}b, {wrong}{marks.end}"
            assert accepts(words, grammar, f"{thought}{opening}{right}{marks.answer_end}")
            assert accepts(words, grammar, thought + right) and not accepts(words, grammar, thought + wrong)
            assert not accepts(words, grammar, thought)
            parser = ReplyParser("key", dialect.make_reasoning_parser(ids))
            parts = parser.parse_chunk(f"{thought}{opening}{right}{marks.answer_end}", at_end=True)
            assert (
                join_part_texts(parts, ReasoningDelta) == f"b, {wrong}"
                and join_part_texts(parts, TextDelta) == right
            )
            assert accepts(words, grammar, right) == bool(before), "a begun reasoning has to end"


def lark(text: str, **fields: str) -> dict[str, str]:
    return {"lark_grammar": text, **fields}


@pytest.mark.parametrize(
    "given",
    [
        [lark("start: @b", name="first"), lark('start: "a" | "(" @first ")"', name="b")],
        [lark("start: @answer"), lark('start: "a" | "(" @answer ")"', name="answer")],
        [lark("start: @b", name="not for Lark"), lark('start: "a" | "(" @b ")"', name="b")],
    ],
)
def test_grammars_keep_their_names_after_the_reasoning(given):
    pytest.importorskip("llguidance")
    words = reasoning_model(REASONING[-2], is_special=True)
    asked = StructuredOutputsParams(grammar=json.dumps({"grammars": given}))
    grammar = Dialect(words).grammar_with_reasoning(asked, words.encode("a"))
    assert accepts(words, grammar, "<think>b</think>((a))")
    assert not accepts(words, grammar, "<think>b</think>((a)")


@pytest.mark.parametrize(
    ("grammars", "why"), [({"a": 1}, "needs a list"), ([1], "is an object"), ("a", "needs a list")]
)
def test_what_is_no_list_of_grammars_says_so(grammars, why):
    pytest.importorskip("llguidance")
    words = reasoning_model(REASONING[-2], is_special=True)
    asked = StructuredOutputsParams(grammar=json.dumps({"grammars": grammars}))
    with pytest.raises(ValueError, match=f"structured_outputs is not allowed: .*{why}"):
        Dialect(words).grammar_with_reasoning(asked, words.encode("a"))


def test_a_panic_before_the_reasoning_is_an_error(monkeypatch):
    words = reasoning_model(REASONING[-2], is_special=True)

    class PanicException(BaseException): ...

    def panics(regex: str) -> str:
        raise PanicException(regex)

    own = SimpleNamespace(LLMatcher=SimpleNamespace(grammar_from_regex=panics))
    monkeypatch.setattr(grammar_cache, "import_llguidance", lambda: own)
    with pytest.raises(ValueError, match="llguidance panicked: a"):
        Dialect(words).grammar_with_reasoning(StructuredOutputsParams(regex="a"), words.encode("a"))


def test_without_reasoning_a_grammar_begins_at_once():
    """Where a template has ended the reasoning, or knows none."""
    qwen = reasoning_model(REASONING[-2], is_special=True)
    asked = StructuredOutputsParams(choice=["a"])
    ended = qwen.encode("a<think>\n\n</think>\n\n")
    assert Dialect(qwen).grammar_with_reasoning(asked, ended) is asked
    assert Dialect(letters("{{ messages }}")).grammar_with_reasoning(asked, [1]) is asked


def test_a_chats_parameters_have_the_grammar_after_the_reasoning():
    pytest.importorskip("llguidance")
    words = reasoning_model(REASONING[-2], is_special=True)
    body = CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": X}}}
    task = parse_task("chat", None, body, {}, None)
    params = task_sampling_params(task, Dialect(words), tokenize_prompt(task, words, 100))
    assert params.structured_outputs is not None and not params.skip_special_tokens
    assert accepts(words, params.structured_outputs, '<think>hm</think>\n\n{"x": 3}')
    plain = parse_task("completion", None, {"prompt": "x", "guided_json": X}, {}, None)
    assert task_sampling_params(plain, Dialect(words), [1]) is plain.params


@pytest.mark.parametrize("is_special", [True, False])
def test_library_chats_apply_the_grammar_after_the_reasoning(is_special):
    pytest.importorskip("llguidance")
    words = reasoning_model(REASONING[-2], is_special)
    processor = InputProcessor(len(words), 100, EngineOptions(), words, (words.token_id("<eos>"),))
    asked, plain = SamplingParams(structured_outputs={"choice": ["a"]}), SamplingParams()
    both = [CHAT["messages"]] * 2
    _, (own, other) = processor.render_conversations(both, [asked, plain], "auto", None, None)
    assert other is plain and own.skip_special_tokens is not is_special
    assert accepts(words, own.structured_outputs, "<think>b</think>\n\na")
    assert not accepts(words, own.structured_outputs, "<think>b</think>b")
    _, (same, _) = processor.render_conversations(both, asked, "auto", None, None)
    assert same == own
    begun = [*CHAT["messages"], {"role": "assistant", "content": "x"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    words.chat_template = "{{ messages[-1].content }}" + (words.chat_template or "")
    assert processor.render_conversations(begun, asked, "auto", None, None, **more)[1] is asked
    with pytest.raises(ValueError, match="2 prompts have 1 sampling_params"):
        processor.render_conversations(both, [asked], "auto", None, None)


@pytest.mark.parametrize("asked", ["choice", "regex"])
@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
@pytest.mark.parametrize("begun", [True, False])
def test_newlines_behind_the_reasoning_are_no_part_of_the_answer(begun, gap, asked):
    """In whole replies and in streams of one character a chunk, with a choice and with a regular
    expression."""
    pytest.importorskip("llguidance")
    words, (own, right, _) = reasoning_model(REASONING[-2], is_special=True), WANTED[asked]
    task = parse_task("chat", None, CHAT | {"structured_outputs": own}, {}, None)
    prompt = words.encode("x<think>" if begun else "x")
    text = f"{'' if begun else '<think>'}hm</think>{gap}{right}"
    params = task_sampling_params(task, Dialect(words), prompt)
    assert params.structured_outputs is not None and accepts(words, params.structured_outputs, text)
    replies, ids = Replies("m", words), words.encode(text)
    whole = replies.chat_choice(
        CompletionOutput(0, text, ids, finish_reason="stop"),
        task,
        replies.make_reply_parser(task, prompt, "a"),
    )
    assert whole["message"]["content"] == right and whole["message"]["reasoning"] == "hm"
    parser, ends = replies.make_reply_parser(task, prompt, "a"), [None] * (len(text) - 1) + ["stop"]
    pieces = [CompletionOutput(0, c, [1], finish_reason=end) for c, end in zip(text, ends, strict=True)]
    deltas = [replies.chat_delta(piece, task, parser)["delta"] for piece in pieces]
    assert "".join(delta.get("content", "") for delta in deltas) == right


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_is_a_variable_of_the_template(effort):
    wanted = {"reasoning_effort": effort} | dict.fromkeys(("enable_thinking", "thinking"), effort != "none")
    chat = parse_task("chat", None, CHAT | {"reasoning_effort": effort}, {}, None)
    response = parse_response_task({"input": "x", "reasoning": {"effort": effort, "summary": None}}, {})
    assert chat.template_variables == response.template_variables == wanted
    own = CHAT | {"reasoning_effort": effort, "chat_template_kwargs": {"thinking": 3}}
    assert parse_task("chat", None, own, {}, None).template_variables == wanted | {"thinking": 3}


@pytest.mark.parametrize(
    ("body", "named"),
    [({"reasoning_effort": "much"}, 'reasoning_effort="much" .*minimal'), ({"reasoning_effort": 3}, "=3 ")],
)
def test_other_efforts_are_refused(body, named):
    with pytest.raises(RequestError, match=named):
        parse_task("chat", None, CHAT | body, {}, None)


@pytest.mark.parametrize("reasoning", [{"effort": "much"}, {"summary": "auto"}, "high", {"budget": 3}])
def test_what_a_response_cannot_have_of_reasoning_is_refused(reasoning):
    with pytest.raises(RequestError, match="reasoning"):
        parse_response_task({"input": "x", "reasoning": reasoning}, {})


def test_gpt_oss_reads_the_effort():
    task = parse_task("chat", None, CHAT | {"reasoning_effort": "high"}, {}, None)
    text = render_chat(template("gpt_oss"), [ASKED], **TOKENS, **task.template_variables)
    assert "Reasoning: high" in text
    assert json.dumps(task.template_variables)
