"""The formats of tool calls that are read and asked for, by their names in `checkpoints.dialects`."""

from dataclasses import replace

from ....checkpoints.dialects import TOOL_CALLS, ToolCallMarks, find_tool_call_marks
from .call_forms import JsonCall, NamedJsonCall, TaggedCall
from .python_call import PYTHON_WORDS, PythonCall
from .tool_parser import ToolFormat

QWEN = TaggedCall(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", padding="\n", space="\n"
)
SEED = TaggedCall(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", space="\n")
MINIMAX = TaggedCall(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
GLM = TaggedCall(("", ""), ("<arg_key>", "</arg_key>\n"), ("<arg_value>", "</arg_value>"), space="\n")
KIMI = NamedJsonCall(
    "<|tool_call_begin|>",
    ("<|tool_call_argument_begin|>",),
    "<|tool_call_end|>",
    prefix="functions.",
    is_numbered=True,
    section_ends=("<|tool_call_section_end|>",),
)
DEEPSEEK_V3 = NamedJsonCall(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", ("\n```json\n",), "\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_V31 = NamedJsonCall("<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>",), "<｜tool▁call▁end｜>")
HARMONY = NamedJsonCall(
    separators=(
        " <|constrain|>json<|message|>",
        "json<|message|>",
        "<|message|>",
        "<|channel|>commentary json<|message|>",
        "<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
    ),
    prefix="functions.",
)
MISTRAL = NamedJsonCall(separators=("[ARGS]", ""), id_mark="[CALL_ID]")

TOOL_FORMATS = {
    "openai": ToolFormat(
        (HARMONY,),
        other_begins=(
            "<|start|>assistant<|channel|>commentary to=",
            "<|start|>assistant to=",
            "<|start|>assistant<|channel|>analysis to=",
            "<|channel|>analysis to=",
        ),
        is_single=True,
    ),
    "kimi_k2": ToolFormat((KIMI,), separator="", other_begins=("<|tool_call_section_begin|>",)),
    "cohere_command": ToolFormat(
        (JsonCall("tool_name", "parameters", "tool_call_id"),), "[\n    ", "\n]", separator=",\n    "
    ),
    "granite": ToolFormat((JsonCall(),), "[", "]", separator=", "),
    "mistral": ToolFormat((JsonCall(), MISTRAL), section_separator="", has_short_ids=True),
    "mistral_list": ToolFormat((MISTRAL, JsonCall()), "[", "]", separator=", ", has_short_ids=True),
    "deepseek_v3": ToolFormat((DEEPSEEK_V3,), separator="\n"),
    "deepseek_v31": ToolFormat((DEEPSEEK_V31,), separator=""),
    "minimax_m2": ToolFormat((MINIMAX,), "\n", "\n", separator="\n", has_bare_calls=True),
    "seed_oss": ToolFormat((SEED,), "\n", "\n", has_bare_calls=True),
    "hunyuan_a13b": ToolFormat((JsonCall(),), "[", "]", separator=", "),
    "lfm2": ToolFormat((PythonCall(PYTHON_WORDS),), "[", "]", separator=", ", is_loose=True),
    "olmo3": ToolFormat((PythonCall(),), separator="\n", is_loose=True),
    "glm45": ToolFormat((GLM,)),
    "qwen3_coder": ToolFormat((QWEN,), "\n", "\n", has_bare_calls=True),
    "hermes": ToolFormat((JsonCall(),), "\n", "\n"),
    "llama4_json": ToolFormat((JsonCall(arguments_key="parameters"),), separator="; ", is_bare=True),
    "llama3_json": ToolFormat((JsonCall(arguments_key="parameters"),), separator="; ", is_bare=True),
}
MARKS_BY_NAME = {row.name: row for row in TOOL_CALLS}


def find_marks_format(calls: ToolCallMarks) -> ToolFormat | None:
    """Return the format of a row of the table; None if it cannot be read."""
    tool_format = TOOL_FORMATS.get(calls.name)
    return None if tool_format is None else replace(tool_format, begin=calls.begin, end=calls.end)


def find_tool_format(name: str) -> ToolFormat:
    """Return the format of a name. Raises ValueError for an unknown one."""
    tool_format = find_marks_format(MARKS_BY_NAME[name]) if name in MARKS_BY_NAME else None
    if tool_format is None:
        raise ValueError(
            f"tool_call_parser {name!r} is not allowed: one of {', '.join(sorted(TOOL_FORMATS))}"
        )
    return tool_format


def find_template_format(template: str) -> ToolFormat | None:
    """Return the format of a model with this chat template; None if it has none, or one that is not read."""
    calls = find_tool_call_marks(template)
    return None if calls is None else find_marks_format(calls)
