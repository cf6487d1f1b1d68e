"""Parsed bodies of completions, chats and responses: a task for each prompt, and the form of the answer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...text.openai.errors import RequestError, flag, require
from ...text.openai.responses import task_of_response
from ...text.openai.resume import ResumeState, resume_of
from ...text.openai.tasks import MAX_CHOICES, Form, Task, listed, task_of_body

REPEATED = "instructions", "metadata", "text", "tools", "tool_choice", "parallel_tool_calls", "reasoning"


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body.

    tasks: one for each prompt
    usage: whether a stream ends with a chunk that counts tokens
    echo: whether prompts stand in front of their continuations
    silent: whether there is no continuation, only the echo
    repeated: fields of the body that the answer repeats
    resume: an answer that another server has begun
    created: seconds since 1970
    """

    tasks: list[Task]
    stream: bool = False
    usage: bool = False
    echo: bool = False
    silent: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    resume: ResumeState | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        if self.resume is not None:
            object.__setattr__(self, "tasks", self.resume.tasks(self.tasks))
            object.__setattr__(self, "created", self.resume.created)
            unscored = self.is_resumable or not self.resume.has_begun
            require(
                unscored, "resume", list(self.resume.outputs), "no tokens beside logprobs and stream false"
            )

    @property
    def is_resumable(self) -> bool:
        """True if the answer reports its tokens, so that another server can resume it. A whole answer with
        log-probabilities cannot: those of tokens from another server are unknown."""
        scores = [x for task in self.tasks for x in (task.params.logprobs, task.params.prompt_logprobs)]
        return self.resume is not None and (self.stream or all(x is None for x in scores))


def parse_completion(form: Form, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parse a body. Raises RequestError naming the field, its value and what is allowed."""
    fields, stream, resume = streaming(body)
    usage = wants_usage(fields.pop("stream_options", {}), stream)
    if form == "chat":
        return CompletionRequest(
            [task_of_body(form, None, fields, defaults, None)], stream, usage, resume=resume
        )
    echo = flag(fields, "echo", default=False)
    fields.pop("echo", None)
    silent = echo and fields.get("max_tokens") == 0
    if silent:
        fields["max_tokens"] = 1
    if "prompt" not in fields:
        wanted = "prompt is missing: a string or token ids, or a list of them"
        raise RequestError("invalid_request", wanted, "prompt")
    prompts = listed(fields["prompt"])
    n = fields.get("n", 1)
    many = isinstance(n, int) and len(prompts) * n > MAX_CHOICES
    require(not many, "n", n, f"at most {MAX_CHOICES} completions, {len(prompts)} prompts have n each")
    tasks = [task_of_body(form, None, fields | {"prompt": one}, defaults, None) for one in prompts]
    if echo and "logprobs" in fields:
        require(not stream, "logprobs", fields["logprobs"], "not beside echo and stream")
        tasks = [scored(task) for task in tasks]
    return CompletionRequest(tasks, stream, usage, echo, silent, resume=resume)


def parse_response(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parse the body of a response. Raises RequestError likewise."""
    fields, stream, resume = streaming(body)
    repeated = {name: fields[name] for name in REPEATED if fields.get(name)}
    return CompletionRequest([task_of_response(fields, defaults)], stream, repeated=repeated, resume=resume)


def streaming(body: Mapping[str, Any]) -> tuple[dict[str, Any], bool, ResumeState | None]:
    """Return the fields of a body that have a value, whether the answer is a stream, and what it resumes."""
    fields = {name: value for name, value in body.items() if value is not None}
    stream = flag(fields, "stream", default=False)
    fields.pop("stream", None)
    return fields, stream, resume_of(fields.pop("resume", None))


def wants_usage(options: Any, stream: bool) -> bool:
    require(isinstance(options, dict), "stream_options", options, "an object")
    require(stream or not options, "stream_options", options, "only with stream true")
    others = sorted(options.keys() - {"include_usage", "include_obfuscation", "continuous_usage_stats"})
    require(not others, "stream_options", options, "only include_usage is supported")
    always = options.get("continuous_usage_stats")
    require(not always, "continuous_usage_stats", always, "only false is supported")
    usage = options.get("include_usage") or False
    require(isinstance(usage, bool), "include_usage", usage, "true or false")
    return usage


def scored(task: Task) -> Task:
    return replace(task, params=replace(task.params, prompt_logprobs=task.params.logprobs))
