"""Parsed bodies of completions, chats and responses: a task for each prompt, and the answer's format."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import RequestError, is_flag_set, require_field
from .responses import parse_response_task
from .resume import ResumeState, parse_resume
from .tasks import MAX_CHOICES, Task, TaskForm, list_prompt_values, parse_prompt, parse_task

MAX_METADATA = 16  # pairs: OpenAI's limits, as those of the next line
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters
REPEATED_FIELDS = (
    "instructions",
    "metadata",
    "text",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
)


@dataclass(frozen=True)
class CompletionRequest:
    """A parsed body.

    tasks: one for each prompt
    stream: whether the answer is a stream
    usage: whether a stream ends with a chunk that counts tokens
    echo: whether the answer repeats each prompt before its continuation
    is_echo_only: whether the answer has only the echo, no continuation
    repeated_fields: fields of the body that the answer repeats
    resume: state of an answer that another server has begun
    created: seconds since 1970
    """

    tasks: list[Task]
    stream: bool = False
    usage: bool = False
    echo: bool = False
    is_echo_only: bool = False
    repeated_fields: Mapping[str, Any] = field(default_factory=dict)
    resume: ResumeState | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        if self.resume is not None:
            object.__setattr__(self, "tasks", self.resume.resume_tasks(self.tasks))
            object.__setattr__(self, "created", self.resume.created)
            has_no_scores = self.is_resumable or not self.resume.has_begun
            require_field(
                has_no_scores,
                "resume",
                list(self.resume.outputs),
                "no tokens beside logprobs and stream false",
            )

    @property
    def is_resumable(self) -> bool:
        """True if the answer reports its tokens, so that another server can resume it. A whole answer with
        log-probabilities cannot be resumed: the scores of another server's tokens are unknown."""
        scores = [x for task in self.tasks for x in (task.params.logprobs, task.params.prompt_logprobs)]
        return self.resume is not None and (self.stream or all(x is None for x in scores))


def parse_completion(
    form: TaskForm, body: Mapping[str, Any], defaults: Mapping[str, Any]
) -> CompletionRequest:
    """Parse a body of a completion or a chat. Raises RequestError naming the field, its value and what is
    allowed."""
    fields, stream, resume = split_stream_fields(body)
    usage = needs_usage_chunk(fields.pop("stream_options", {}), stream)
    if form == "chat":
        return CompletionRequest(
            [parse_task(form, None, fields, defaults, None)], stream, usage, resume=resume
        )
    echo = is_flag_set(fields, "echo", default=False)
    fields.pop("echo", None)
    is_echo_only = echo and fields.get("max_tokens") == 0
    if is_echo_only:
        fields["max_tokens"] = 1
    if "prompt" not in fields:
        wanted = "prompt is missing: a string or token ids, or a list of them"
        raise RequestError("invalid_request", wanted, "prompt")
    prompts = list_prompt_values(fields["prompt"])
    n = fields.get("n", 1)
    is_too_many = isinstance(n, int) and len(prompts) * n > MAX_CHOICES
    require_field(
        not is_too_many, "n", n, f"at most {MAX_CHOICES} completions, {len(prompts)} prompts have n each"
    )
    first = parse_task(form, None, fields | {"prompt": prompts[0]}, defaults, None)
    tasks = [first, *(replace(first, prompt=parse_prompt("prompt", prompt)) for prompt in prompts[1:])]
    if echo and "logprobs" in fields:
        require_field(not stream, "logprobs", fields["logprobs"], "not beside echo and stream")
        tasks = [with_prompt_scores(task) for task in tasks]
    return CompletionRequest(tasks, stream, usage, echo, is_echo_only, resume=resume)


def parse_response(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Parse a body of /v1/responses. Raises RequestError naming the field, its value and what is allowed."""
    fields, stream, resume = split_stream_fields(body)
    check_metadata(fields.get("metadata") or {})
    repeated = {name: fields[name] for name in REPEATED_FIELDS if fields.get(name)}
    return CompletionRequest(
        [parse_response_task(fields, defaults)], stream, repeated_fields=repeated, resume=resume
    )


def check_metadata(metadata: Any) -> None:
    """Raise RequestError for metadata above OpenAI's limits: each event of a response repeats them."""
    allowed = (
        f"an object of at most {MAX_METADATA} pairs, keys of at most {MAX_METADATA_KEY} characters, "
        f"values of at most {MAX_METADATA_VALUE}"
    )
    is_small = isinstance(metadata, dict) and len(metadata) <= MAX_METADATA
    require_field(is_small, "metadata", metadata, allowed)
    for key, value in metadata.items():
        is_short = (
            len(key) <= MAX_METADATA_KEY and isinstance(value, str) and len(value) <= MAX_METADATA_VALUE
        )
        require_field(is_short, f"metadata[{key[:MAX_METADATA_KEY]}]", value, allowed)


def split_stream_fields(body: Mapping[str, Any]) -> tuple[dict[str, Any], bool, ResumeState | None]:
    """Return the fields of a body that have a value, whether it asks for a stream, and the answer that it
    resumes. The fields are without `stream` and `resume`."""
    fields = {name: value for name, value in body.items() if value is not None}
    stream = is_flag_set(fields, "stream", default=False)
    fields.pop("stream", None)
    return fields, stream, parse_resume(fields.pop("resume", None))


def needs_usage_chunk(options: Any, stream: bool) -> bool:
    require_field(isinstance(options, dict), "stream_options", options, "an object")
    require_field(stream or not options, "stream_options", options, "only with stream true")
    others = sorted(options.keys() - {"include_usage", "include_obfuscation", "continuous_usage_stats"})
    require_field(not others, "stream_options", options, "only include_usage is supported")
    always = options.get("continuous_usage_stats")
    require_field(not always, "continuous_usage_stats", always, "only false is supported")
    usage = options.get("include_usage") or False
    require_field(isinstance(usage, bool), "include_usage", usage, "true or false")
    return usage


def with_prompt_scores(task: Task) -> Task:
    return replace(task, params=replace(task.params, prompt_logprobs=task.params.logprobs))
