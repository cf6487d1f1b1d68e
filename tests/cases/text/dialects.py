"""Chat templates in `templates/` with what those of families in use in 2026 have: their marks, and the
features of Jinja that they need. Written for these tests.

`dialects.json` holds what Transformers makes of them. `python tests/cases/text/dialects.py` makes it anew; it
needs `transformers`.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models

FILE = Path(__file__).with_name("dialects.json")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "rain",
        "description": "Rain in a city, <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name & country", "enum": ["Malmö", "Oslo"]},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}, "nullable": True},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Malmö", "days": [1, None], "far": False}
CALL = {"id": "functions.rain:0", "type": "function", "function": {"name": "rain", "arguments": ARGUMENTS}}
ASKED = {"role": "user", "content": "Rain in Malmö?"}
CALLED = {"role": "assistant", "content": None, "reasoning": "look", "tool_calls": [CALL]}
SPELLED = {"name": "rain", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
AS_TEXT = {**CALLED, "tool_calls": [{**CALL, "function": SPELLED}]}
RESULT = {"role": "tool", "tool_call_id": "functions.rain:0", "name": "rain", "content": '{"mm": 3}'}
ANSWER = {"role": "assistant", "content": "Yes, 3 mm.", "reasoning_content": "it will"}
SYSTEM = {"role": "system", "content": "Be brief. /no_think"}
CASES: dict[str, dict[str, Any]] = {
    "asked": {"messages": [SYSTEM, ASKED]},
    "called": {"messages": [ASKED, CALLED], "tools": [TOOL]},
    "answered": {"messages": [SYSTEM, ASKED, CALLED, RESULT, ANSWER], "tools": [TOOL]},
    "again": {"messages": [ASKED, ANSWER, {**ASKED, "name": None}], "enable_thinking": False},
    "options": {
        "messages": [ASKED],
        "documents": [{"title": "Weather", "text": "wet"}],
        "reasoning_effort": "low",
        "enable_thinking": True,
        "thinking": True,
        "thinking_budget": 512,
    },
}


class Family(NamedTuple):
    """The notation of calls, what stands before reasoning, what ends a message of the assistant, and whether
    the template takes a call's arguments as JSON text only."""

    calls: str
    thinks: str | None
    ends: str
    as_text: bool = False


FAMILIES = {
    "cohere2": Family("cohere_command", "<|START_THINKING|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek_v31": Family("deepseek_v31", "<think>", "</s>", as_text=True),
    "gemma4": Family("gemma4", "<|channel>thought\n", "<turn|>\n"),
    "glm4_moe": Family("glm45", "<think>", ""),
    "gpt_oss": Family("openai", "<|channel|>analysis<|message|>", "<|return|>"),
    "granite": Family("granite", "<think>", "<|end_of_text|>\n"),
    "kimi_k2": Family("kimi_k2", "<think>", "<|im_end|>"),
    "lfm2": Family("lfm2", None, "<|im_end|>\n"),
    "minimax_m2": Family("minimax_m2", "<think>", "[e~[\n"),
    "mistral": Family("mistral", "[THINK]", "</s>"),
    "qwen3": Family("hermes", "<think>", "<|im_end|>\n"),
    "qwen3_coder": Family("qwen3_coder", None, "<|im_end|>\n"),
    "seed_oss": Family("seed_oss", "<seed:think>", "</s>"),
    "smollm3": Family("hermes", "<think>", "<|im_end|>\n"),
}


def template(family: str) -> str:
    return (FILE.parent / "templates" / f"{family}.jinja").read_text(encoding="utf-8")


def renderings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, a template, and what it is to be rendered with."""
    for family, about in FAMILIES.items():
        for case, given in CASES.items():
            for generate in (True, False):
                options = {**given, "add_generation_prompt": generate}
                if about.as_text:
                    options["messages"] = [AS_TEXT if m is CALLED else m for m in given["messages"]]
                yield f"{family}|{case}|{generate}", template(family), options


def by_transformers(chat_template: str, messages: list[dict], **options: Any) -> str | dict[str, str]:
    """Its text, or the error's."""
    library: Any = import_module("transformers")
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    try:
        return tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False, **options)
    except Exception as error:  # noqa: BLE001 - templates raise anything
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    found = {name: by_transformers(source, **given) for name, source, given in renderings()}
    lines = (f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
