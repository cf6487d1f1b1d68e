"""Tables of what a folder leaves to its publisher's serving code: markers of reasoning and of tool calls, and
pre-tokenizers of tiktoken vocabularies.

A chat template that knows how a model reasons and calls tools writes the markers of both. So it selects a
model's row of a table: the first of which it has all `signs`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class TemplateRule:
    """A row of a table, and what a template of its models has."""

    signs: tuple[str, ...]


@dataclass(frozen=True)
class Marks(TemplateRule):
    """Markers of reasoning: `begin` and `end` around it, and around the answer after it one of `opens`, and
    `closes`, for models that mark answers."""

    begin: str
    end: str
    opens: tuple[str, ...] = ()
    closes: str = ""


@dataclass(frozen=True)
class Calls(TemplateRule):
    """Markers of tool calls: they stand between `begin` and `end`, "" where they end with the message.
    `name`: vLLM's `--tool-call-parser` for the notation between them; the older of Mistral's two notations,
    which share one there, has its own name. Llama's models may omit `begin` at the start of a message."""

    name: str
    begin: str
    end: str = ""


REASONING = (
    Marks(  # gpt-oss: channels of the harmony format
        ("<|channel|>analysis",),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
    ),
    Marks(("<channel|>",), "<|channel>thought\n", "<channel|>"),  # Gemma 4
    Marks(  # Command A and R7B
        ("<|END_THINKING|>",),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>",),
        "<|END_RESPONSE|>",
    ),
    Marks(("</seed:think>",), "<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks(("[/THINK]",), "[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Marks(  # Granite 3.2
        ("Here is my thought process:",), "Here is my thought process:", "Here is my response:"
    ),
    # Granite 3.3, ERNIE 4.5
    Marks(("think>", "<response>"), "<think>", "</think>", ("<response>",), "</response>"),
    Marks(("think>", "<answer>"), "<think>", "</think>", ("<answer>",), "</answer>"),  # Hunyuan
    # Qwen 3 and 3.5, GLM 4.5, Kimi K2, MiniMax M2, DeepSeek, EXAONE 4, SmolLM3; OLMo 3 writes the first only
    Marks(("</think>",), "<think>", "</think>"),
    Marks(("<think>",), "<think>", "</think>"),
)

CALLS = (
    Calls(("<|channel|>commentary",), "openai", "<|channel|>commentary to=", "<|call|>"),  # gpt-oss
    Calls(("<|tool_call>",), "gemma4", "<|tool_call>", "<tool_call|>"),
    Calls(
        ("<|tool_calls_section_begin|>",),
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    Calls(("<|START_ACTION|>",), "cohere_command", "<|START_ACTION|>", "<|END_ACTION|>"),
    Calls(("<|tool_call_start|>",), "lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    Calls(("<|tool_call|>",), "granite", "<|tool_call|>"),  # Granite 3; the fourth has Hermes' notation
    Calls(("[TOOL_CALLS]", "[ARGS]"), "mistral", "[TOOL_CALLS]"),  # since version 11
    Calls(("[TOOL_CALLS]",), "mistral_list", "[TOOL_CALLS]"),
    Calls(
        ("<｜tool▁calls▁begin｜>", "```json"),
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    Calls(("<｜tool▁calls▁begin｜>",), "deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    Calls(("<minimax:tool_call>",), "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
    Calls(("<seed:tool_call>",), "seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
    Calls(("<function_calls>",), "olmo3", "<function_calls>", "</function_calls>"),
    Calls(("<tool_calls>",), "hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
    Calls(("<arg_key>",), "glm45", "<tool_call>", "</tool_call>"),
    Calls(("<function=",), "qwen3_coder", "<tool_call>", "</tool_call>"),  # Qwen3-Coder, Qwen 3.5
    Calls(("<tool_call>",), "hermes", "<tool_call>", "</tool_call>"),  # Qwen 2.5 and 3, EXAONE 4, ERNIE 4.5
    Calls(("<|python_start|>",), "llama4_json", "<|python_start|>", "<|python_end|>"),
    Calls(("ipython", '"parameters": '), "llama3_json", "<|python_tag|>"),
)


R = TypeVar("R", bound=TemplateRule)


def marks_of(template: str) -> Marks | None:
    """Reasoning markers of a model with this chat template, or None."""
    return first(REASONING, template)


def calls_of(template: str) -> Calls | None:
    """Tool-call markers of a model with this chat template, or None."""
    return first(CALLS, template)


def first(rows: Iterable[R], template: str) -> R | None:
    return next((row for row in rows if all(sign in template for sign in row.signs)), None)


# ---------------------------------------------------------------- pre-tokenizers of tiktoken vocabularies


@dataclass(frozen=True)
class PretokenizerRules:
    """Pre-tokenizer of a tiktoken vocabulary. `pattern`: splits texts into words. `composes`: texts are
    normalised first (Unicode's NFC). `special`: tokens after the ranks; `{id}` is replaced by the token's
    id."""

    pattern: str
    composes: bool = False
    special: tuple[str, ...] = ()


_PREFIX, _ENDINGS = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# By the class that `tokenizer_config.json` names.
PRETOKENIZERS = {
    # Kimi K2, Moonlight: runs of Chinese characters by themselves
    "TikTokenTokenizer": PretokenizerRules(
        rf"[\p{{Han}}]+|{_PREFIX}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}|{_REST}",
        special=("<|reserved_token_{id}|>",) * 258,
    ),
    # the first Qwen
    "QWenTokenizer": PretokenizerRules(
        rf"{_ENDINGS}|{_PREFIX}\p{{L}}+|\p{{N}}|{_REST}",
        composes=True,
        special=(
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
        ),
    ),
}  # fmt: skip
