"""The notations that are read and asked for, by their names in `checkpoints.dialects`."""

from ....checkpoints.dialects import CALLS, Calls, calls_of
from .headed import Headed
from .notation import CallLayout, Notation
from .objects import Objects
from .tagged import Tagged

QWEN = Tagged(
    ("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", padding="\n", space="\n"
)
SEED = Tagged(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", space="\n")
MINIMAX = Tagged(('<invoke name="', '">'), ('<parameter name="', '">'), ("", "</parameter>"), "</invoke>")
GLM = Tagged(("", ""), ("<arg_key>", "</arg_key>\n"), ("<arg_value>", "</arg_value>"), space="\n")
KIMI = Headed(
    "<|tool_call_begin|>",
    ("<|tool_call_argument_begin|>",),
    "<|tool_call_end|>",
    prefix="functions.",
    is_numbered=True,
)
DEEPSEEK_V3 = Headed(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", ("\n```json\n",), "\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_V31 = Headed("<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>",), "<｜tool▁call▁end｜>")
MISTRAL = Headed(between=("[ARGS]", ""), id_mark="[CALL_ID]")

LAYOUTS = {
    "kimi_k2": CallLayout((KIMI,), between=""),
    "cohere_command": CallLayout(
        (Objects("tool_name", "parameters", "tool_call_id"),), "[\n    ", "\n]", between=",\n    "
    ),
    "granite": CallLayout((Objects(),), "[", "]", between=", "),
    "mistral": CallLayout((Objects(), MISTRAL), apart="", has_short_ids=True),
    "mistral_list": CallLayout((MISTRAL, Objects()), "[", "]", between=", ", has_short_ids=True),
    "deepseek_v3": CallLayout((DEEPSEEK_V3,), between="\n"),
    "deepseek_v31": CallLayout((DEEPSEEK_V31,), between=""),
    "minimax_m2": CallLayout((MINIMAX,), "\n", "\n", between="\n"),
    "seed_oss": CallLayout((SEED,), "\n", "\n"),
    "hunyuan_a13b": CallLayout((Objects(),), "[", "]", between=", "),
    "glm45": CallLayout((GLM,)),
    "qwen3_coder": CallLayout((QWEN,), "\n", "\n"),
    "hermes": CallLayout((Objects(),), "\n", "\n"),
    "llama4_json": CallLayout((Objects(arguments="parameters"),), between="; ", is_bare=True),
    "llama3_json": CallLayout((Objects(arguments="parameters"),), between="; ", is_bare=True),
}
ROWS = {row.name: row for row in CALLS}


def notation(calls: Calls) -> Notation | None:
    """The notation of a row, if it can be read."""
    layout = LAYOUTS.get(calls.name)
    return None if layout is None else Notation(calls.begin, calls.end, layout)


def named(name: str) -> Notation:
    """The notation of a name. Raises ValueError where there is none."""
    found = notation(ROWS[name]) if name in ROWS else None
    if found is None:
        raise ValueError(f"tool_call_parser {name!r} is not allowed: one of {', '.join(sorted(LAYOUTS))}")
    return found


def notation_of(template: str) -> Notation | None:
    """How a model of this chat template writes calls, if it does and that can be read."""
    calls = calls_of(template)
    return None if calls is None else notation(calls)
