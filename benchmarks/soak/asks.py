"""Seeded requests of all kinds: the request of a seed and a number is always the same."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.models import ADAPTERS

NAME = "demo"  # of the model, in the API
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
WORDS = ("add", "sort", "merge", "read", "write", "parse", "count", "split", "join", "walk", "find", "load")
LINES = 24  # of a prompt that others share
FIELDS = {"city": {"enum": ["Bern", "Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
GRAMMARS = (
    {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}( [a-z]+){2,5}"}},
    {"structured_outputs": {"choice": ["positive", "negative", "neither"]}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "stay", "schema": SCHEMA, "strict": True},
        }
    },
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("rain", "snow")
]


@dataclass(frozen=True)
class Ask:
    """A request.

    kind: its name in KINDS
    path: of the API
    body: its fields, without `stream`
    """

    number: int
    kind: str
    path: str
    body: dict[str, Any]

    @property
    def has_adapter(self) -> bool:
        return self.body["model"] != NAME


def short(chance: random.Random) -> dict[str, Any]:
    return {"prompt": f"def {word(chance)}(", "max_tokens": chance.randrange(16, 72), "ignore_eos": True}


def lengthy(chance: random.Random) -> dict[str, Any]:
    """An answer that is under way for so long that kills strike it."""
    return short(chance) | {"max_tokens": chance.randrange(160, 320)}


def shared(chance: random.Random) -> dict[str, Any]:
    """A long prompt that begins as several others do."""
    file = chance.randrange(8)
    text = "".join(f"def {WORDS[file]}_{line}(x, y):\n    return x + {line} * y\n" for line in range(LINES))
    return {"prompt": f"{text}def {word(chance)}(x):\n", "max_tokens": chance.randrange(8, 32)}


def copied(chance: random.Random) -> dict[str, Any]:
    """A text that repeats itself, so that draft tokens are accepted."""
    name = word(chance)
    text = "".join(f"{name}_{i} = load({name}_{i})\n" for i in range(chance.randrange(4, 12)))
    return {"prompt": text, "max_tokens": chance.randrange(24, 64)}


def scored(chance: random.Random) -> dict[str, Any]:
    sampling = {"logprobs": 2, "presence_penalty": 0.5, "logit_bias": {str(chance.randrange(300)): 2.0}}
    return {"prompt": f"class {word(chance)}:\n", "max_tokens": 32, "stop": ["\n\n", "return"]} | sampling


def several(chance: random.Random) -> dict[str, Any]:
    return {"prompt": f"import {word(chance)}\n", "max_tokens": 24, "n": 2, "temperature": 0.8}


def formal(chance: random.Random) -> dict[str, Any]:
    return {"prompt": f"# {word(chance)}\n", "max_tokens": 48} | chance.choice(GRAMMARS)


def chat(chance: random.Random) -> dict[str, Any]:
    return {"messages": messages(f"{word(chance)} a {word(chance)}"), "max_tokens": chance.randrange(12, 40)}


def tools(chance: random.Random) -> dict[str, Any]:
    asked = {"messages": messages(f"the weather of {word(chance)}"), "max_tokens": 64}
    return asked | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": chance.random() < 0.5}


def adapted(chance: random.Random) -> dict[str, Any]:
    return short(chance) | {"model": chance.choice(ADAPTERS)}


def word(chance: random.Random) -> str:
    return f"{chance.choice(WORDS)}_{chance.randrange(100)}"


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    one.__name__: one
    for one in (short, lengthy, shared, copied, scored, several, formal, chat, tools, adapted)
}


def ask(seed: int, number: int) -> Ask:
    """Return a request of a run; those of consecutive numbers are of all kinds."""
    chance = random.Random(f"{seed} {number}")
    kind = [*KINDS][number % len(KINDS)]
    body = KINDS[kind](chance)
    greedy = {"temperature": 0.0} if chance.random() < 0.4 else {"temperature": 0.9, "top_p": 0.95}
    path = PATHS["chat" if "messages" in body else "completion"]
    return Ask(number, kind, path, {"model": NAME, "seed": number, "return_token_ids": True} | greedy | body)
