"""The formats of tool calls that are read and asked for, by their names in `checkpoints.dialects`."""

from dataclasses import replace

from ....checkpoints.dialects import CALLS, Calls, calls_of
from .call_forms import PYTHON, JsonCall, NamedJsonCall, PythonCall, TaggedCall
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
)
DEEPSEEK_V3 = NamedJsonCall(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", ("\n```json\n",), "\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_V31 = NamedJsonCall("<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>",), "<｜tool▁call▁end｜>")
HARMONY = NamedJsonCall(
    between=(
        " <|constrain|>json<|message|>",
        "json<|message|>",
        "<|message|>",
        "<|channel|>commentary json<|message|>",
        "<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>",
    ),
    prefix="functions.",
)
MISTRAL = NamedJsonCall(between=("[ARGS]", ""), id_mark="[CALL_ID]")

FORMATS = {
    "openai": ToolFormat(
        (HARMONY,),
        also=("<|start|>assistant<|channel|>commentary to=", "<|start|>assistant to="),
        is_single=True,
    ),
    "kimi_k2": ToolFormat((KIMI,), between=""),
    "cohere_command": ToolFormat(
        (JsonCall("tool_name", "parameters", "tool_call_id"),), "[\n    ", "\n]", between=",\n    "
    ),
    "granite": ToolFormat((JsonCall(),), "[", "]", between=", "),
    "mistral": ToolFormat((JsonCall(), MISTRAL), apart="", has_short_ids=True),
    "mistral_list": ToolFormat((MISTRAL, JsonCall()), "[", "]", between=", ", has_short_ids=True),
    "deepseek_v3": ToolFormat((DEEPSEEK_V3,), between="\n"),
    "deepseek_v31": ToolFormat((DEEPSEEK_V31,), between=""),
    "minimax_m2": ToolFormat((MINIMAX,), "\n", "\n", between="\n"),
    "seed_oss": ToolFormat((SEED,), "\n", "\n"),
    "hunyuan_a13b": ToolFormat((JsonCall(),), "[", "]", between=", "),
    "lfm2": ToolFormat((PythonCall(PYTHON),), "[", "]", between=", ", is_loose=True),
    "olmo3": ToolFormat((PythonCall(),), between="\n", is_loose=True),
    "glm45": ToolFormat((GLM,)),
    "qwen3_coder": ToolFormat((QWEN,), "\n", "\n"),
    "hermes": ToolFormat((JsonCall(),), "\n", "\n"),
    "llama4_json": ToolFormat((JsonCall(arguments="parameters"),), between="; ", is_bare=True),
    "llama3_json": ToolFormat((JsonCall(arguments="parameters"),), between="; ", is_bare=True),
}
ROWS = {row.name: row for row in CALLS}


def format_of(calls: Calls) -> ToolFormat | None:
    """Return the format of a row of the table; None if it cannot be read."""
    found = FORMATS.get(calls.name)
    return None if found is None else replace(found, begin=calls.begin, end=calls.end)


def format_named(name: str) -> ToolFormat:
    """Return the format of a name. Raises ValueError for an unknown one."""
    found = format_of(ROWS[name]) if name in ROWS else None
    if found is None:
        raise ValueError(f"tool_call_parser {name!r} is not allowed: one of {', '.join(sorted(FORMATS))}")
    return found


def template_format(template: str) -> ToolFormat | None:
    """Return the format of a model with this chat template; None if it has none, or one that is not read."""
    calls = calls_of(template)
    return None if calls is None else format_of(calls)
