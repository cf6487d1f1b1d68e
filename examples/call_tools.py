"""Let a model call functions of this script, and give it their results:
`python examples/call_tools.py [MODEL]`.

The small model that ships with duetto was not trained on tools. So the script requires a call
(`tool_choice="required"`), in the notation of Qwen's models: the output is always a call of one of the
functions, with arguments of its schema, though not a sensible one. For a model whose chat template has tools,
the script leaves `tool_choice` at "auto".
"""

import json
import sys
from typing import Any

from duetto import LLM, SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "rain",
            "description": "Rain in a city, in millimetres",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Malmö", "Oslo", "Bergen"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "cities", "description": "The cities that are known"}},
]
FUNCTIONS = {
    "rain": lambda city, days: {"city": city, "mm": [3 * len(city) - day for day in range(days)]},
    "cities": lambda: ["Malmö", "Oslo", "Bergen"],
}


def main(model: str | None) -> None:
    asked: dict[str, Any] = {"tools": TOOLS}
    if model is None:
        asked |= {"tool_choice": "required", "tool_call_parser": "hermes", "parallel_tool_calls": False}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in Bergen this week?"}]
    with LLM(model) as llm:
        (choice,) = llm.reply(messages, SamplingParams(temperature=1.0, seed=7, max_tokens=256), **asked)
        messages.append(choice["message"])
        for call in choice["message"].get("tool_calls", []):
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = FUNCTIONS[name](**arguments)
            print(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())}) -> {result}")
            content = json.dumps(result, ensure_ascii=False)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        asked["tool_choice"] = "none"
        (choice,) = llm.reply(messages, SamplingParams(temperature=0.0, max_tokens=64), **asked)
        print(choice["message"]["content"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
