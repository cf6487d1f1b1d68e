"""Tables by model: markers of reasoning, markers of tool calls, and pre-tokenizers of tiktoken vocabularies.

A folder does not state these; they are in its publisher's serving code. The markers are found by the chat
template: the first row of a table counts whose `template_substrings` the template has all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class TemplateRule:
    """Row of a table of markers.

    template_substrings: substrings; the row applies to a chat template that contains all of them.
    """

    template_substrings: tuple[str, ...]


@dataclass(frozen=True)
class ReasoningMarks(TemplateRule):
    """Markers around a model's reasoning, and around its answer.

    begin, end: before and after the reasoning.
    answer_begins: alternatives before the answer; empty for models that do not mark it.
    answer_end: after the answer; "" if there is none.
    """

    begin: str
    end: str
    answer_begins: tuple[str, ...] = ()
    answer_end: str = ""


@dataclass(frozen=True)
class ToolCallMarks(TemplateRule):
    """Markers around a model's tool calls.

    name: notation between the markers, as vLLM's `--tool-call-parser`. Mistral's older notation, which shares
    a name there, is "mistral_list".
    begin: before the calls. Llama's models may omit it at the start of a message.
    end: after the calls; "" if the end of the message ends them.
    """

    name: str
    begin: str
    end: str = ""


REASONING = (
    ReasoningMarks(  # gpt-oss: channels of the harmony format
        ("<|channel|>analysis",),
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
    ),
    ReasoningMarks(("<channel|>",), "<|channel>thought\n", "<channel|>"),  # Gemma 4
    ReasoningMarks(  # Command A and R7B
        ("<|END_THINKING|>",),
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>",),
        "<|END_RESPONSE|>",
    ),
    ReasoningMarks(("</seed:think>",), "<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarks(("[/THINK]",), "[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ReasoningMarks(  # Granite 3.2
        ("Here is my thought process:",), "Here is my thought process:", "Here is my response:"
    ),
    # Granite 3.3, ERNIE 4.5
    ReasoningMarks(("think>", "<response>"), "<think>", "</think>", ("<response>",), "</response>"),
    ReasoningMarks(("think>", "<answer>"), "<think>", "</think>", ("<answer>",), "</answer>"),  # Hunyuan
    # Qwen 3 and 3.5, GLM 4.5, Kimi K2, MiniMax M2, DeepSeek, EXAONE 4, SmolLM3; OLMo 3 writes <think> only
    ReasoningMarks(("</think>",), "<think>", "</think>"),
    ReasoningMarks(("<think>",), "<think>", "</think>"),
)

TOOL_CALLS = (
    ToolCallMarks(("<|channel|>commentary",), "openai", "<|channel|>commentary to=", "<|call|>"),  # gpt-oss
    ToolCallMarks(("<|tool_call>",), "gemma4", "<|tool_call>", "<tool_call|>"),
    ToolCallMarks(
        ("<|tool_calls_section_begin|>",),
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    ToolCallMarks(("<|START_ACTION|>",), "cohere_command", "<|START_ACTION|>", "<|END_ACTION|>"),
    ToolCallMarks(("<|tool_call_start|>",), "lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    # Granite 3; Granite 4 has Hermes' notation
    ToolCallMarks(("<|tool_call|>",), "granite", "<|tool_call|>"),
    # Mistral's notation since version 11
    ToolCallMarks(("[TOOL_CALLS]", "[ARGS]"), "mistral", "[TOOL_CALLS]"),
    ToolCallMarks(("[TOOL_CALLS]",), "mistral_list", "[TOOL_CALLS]"),
    ToolCallMarks(
        ("<｜tool▁calls▁begin｜>", "```json"),
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    ToolCallMarks(
        ("<｜tool▁calls▁begin｜>",), "deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    ),
    ToolCallMarks(("<minimax:tool_call>",), "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
    ToolCallMarks(("<seed:tool_call>",), "seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
    ToolCallMarks(("<function_calls>",), "olmo3", "<function_calls>", "</function_calls>"),
    ToolCallMarks(("<tool_calls>",), "hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
    ToolCallMarks(("<arg_key>",), "glm45", "<tool_call>", "</tool_call>"),
    ToolCallMarks(("<function=",), "qwen3_coder", "<tool_call>", "</tool_call>"),  # Qwen3-Coder, Qwen 3.5
    # Qwen 2.5 and 3, EXAONE 4, ERNIE 4.5
    ToolCallMarks(("<tool_call>",), "hermes", "<tool_call>", "</tool_call>"),
    ToolCallMarks(("<|python_start|>",), "llama4_json", "<|python_start|>", "<|python_end|>"),
    ToolCallMarks(("ipython", '"parameters": '), "llama3_json", "<|python_tag|>"),
)


R = TypeVar("R", bound=TemplateRule)


def find_reasoning_marks(template: str) -> ReasoningMarks | None:
    """Return the reasoning markers of a model with this chat template, or None."""
    return select_rule(REASONING, template)


def find_tool_call_marks(template: str) -> ToolCallMarks | None:
    """Return the tool-call markers of a model with this chat template, or None."""
    return select_rule(TOOL_CALLS, template)


def select_rule(rules: Iterable[R], template: str) -> R | None:
    """Return the first row whose markers are all in a chat template, or None."""
    return next((row for row in rules if all(marker in template for marker in row.template_substrings)), None)


# ---------------------------------------------------------------- pre-tokenizers of tiktoken vocabularies


@dataclass(frozen=True)
class PretokenizerRules:
    """Pre-tokenizer of a tiktoken vocabulary.

    pattern: regular expression that splits a text into words.
    uses_nfc: texts are normalised to Unicode's NFC first.
    special: tokens after the ranks; `{id}` is replaced by the token's id.
    """

    pattern: str
    uses_nfc: bool = False
    special: tuple[str, ...] = ()


_PREFIX, _ENDINGS = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# By the `tokenizer_class` of `tokenizer_config.json`.
PRETOKENIZERS = {
    # Kimi K2, Moonlight: runs of Chinese characters are words
    "TikTokenTokenizer": PretokenizerRules(
        rf"[\p{{Han}}]+|{_PREFIX}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}|{_REST}",
        special=("<|reserved_token_{id}|>",) * 258,
    ),
    # the first Qwen
    "QWenTokenizer": PretokenizerRules(
        rf"{_ENDINGS}|{_PREFIX}\p{{L}}+|\p{{N}}|{_REST}",
        uses_nfc=True,
        special=(
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)),
        ),
    ),
}  # fmt: skip
