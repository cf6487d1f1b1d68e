"""The tokens that a request counts for in its client's share, as far as its body says."""

from collections.abc import Mapping
from typing import Any

from ...kv.routing.placement import Prompt
from .prompts import LETTERS, MOST, prompts_in

# Fields that bound an answer, the first one that is given counts.
BOUNDS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens", "max_tokens"),
}
UNBOUNDED = {"/v1/completions": 16}  # tokens of an answer whose body names no bound
ROOM = 1 << 12  # the same for answers that end where the model's length does, which a router does not know
CHOICES = 128  # completions of a request at most


def charge(path: str, fields: Mapping[str, Any], prompt: Prompt) -> int:
    """Of all its prompts, of which the first is known as `prompt`, and of all answers to them; at least 1."""
    prompts = prompts_in(path, fields)
    read = prompt.tokens + sum(map(size, prompts[1:]))
    names = BOUNDS.get(path, ())
    if not names:
        return max(1, read)
    given = next((fields[name] for name in names if fields.get(name) is not None), None)
    choices = len(prompts) * allowed(fields.get("n"), 1, CHOICES)
    return max(1, read + choices * allowed(given, UNBOUNDED.get(path, ROOM), MOST))


def allowed(value: Any, default: int, most: int) -> int:
    """A number of a body, at most so much; the default in the place of one that replicas refuse."""
    return min(value, most) if type(value) is int and value > 0 else default


def size(prompt: Any) -> int:
    """About how many tokens a text has; how many ids a list has."""
    if isinstance(prompt, str):
        return len(prompt) // LETTERS
    return len(prompt) if isinstance(prompt, list) else 0
