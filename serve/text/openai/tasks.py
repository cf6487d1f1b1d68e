"""Tasks: parsed requests of OpenAI's API, with vLLM's further fields."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from ....model.pooling import PoolingParams
from ....neutral_values import HARMLESS_FIELDS, NEUTRAL
from ....refusals import is_among, nearest_name
from ....sampling.params import SamplingParams
from ..cache_salt import SALT_FORM, is_cache_salt
from ..tokenizer.chats.chat import (
    EFFORTS,
    RESERVED_VARIABLES,
    ChatTemplateError,
    effort_variables,
    normalise_messages,
    tokenize_chat,
)
from ..tokenizer.tokenizer import Tokenizer
from ..tools.tool import Toolbox
from .body_fields import (
    CacheFields,
    ChatFields,
    CompletionFields,
    FormatFields,
    ProcessorFields,
    ToolFields,
    field_names,
)
from .dialect import Dialect
from .errors import RequestError, is_flag_set, require_field
from .fields import parse_toolbox, with_structured_outputs

TaskForm = Literal["plain", "completion", "chat", "embedding"]
MAX_CHOICES = 128  # completions of one request: OpenAI's limit
MAX_STRINGS = 1024  # stop strings or bad words: each is searched at every token

SAMPLING_PARAM_NAMES = frozenset(
    f.name for f in dataclasses.fields(SamplingParams) if f.metadata.get("flag", True)
)
COMMON_FIELDS = field_names(FormatFields) | field_names(ProcessorFields) | field_names(CacheFields)
CHAT_FIELDS = field_names(ChatFields) | field_names(ToolFields) | COMMON_FIELDS
COMPLETION_FIELDS = field_names(CompletionFields) | COMMON_FIELDS
# Results of these have no place in OpenAI's answers.
PLAIN_ONLY_FIELDS = frozenset({"prompt_logprobs", "detokenize"})
BODY_PARAM_NAMES = SAMPLING_PARAM_NAMES - PLAIN_ONLY_FIELDS
# Defaults of bodies, unless the model's authors recommend others.
FORM_DEFAULTS: dict[TaskForm, dict[str, Any]] = {
    "chat": {"max_tokens": None},
    "completion": {"max_tokens": 16},
}


@dataclass(frozen=True)
class Task:
    """A request for a completion, a chat or an embedding.

    model: name that it gives the model, if any
    pooling: how its prompt is embedded
    include_reasoning: whether the reply has the model's reasoning
    return_token_ids: whether the reply has token ids
    has_id_names: whether log-probabilities name tokens by their ids
    now: time that the chat template sees, of a resumed answer
    resumed_outputs: token ids of its completions so far, of a resumed answer
    prefill_address: address of the engine that prefills its prompt, if a router has chosen one
    cache_salt: only requests with an equal one share its cached pages
    """

    form: TaskForm
    id: str | int | None
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    toolbox: Toolbox | None = None
    model: str | None = None
    pooling: PoolingParams | None = None
    include_reasoning: bool = True
    return_token_ids: bool = False
    has_id_names: bool = False
    now: datetime | None = None
    resumed_outputs: tuple[tuple[int, ...], ...] = ()
    prefill_address: str | None = None
    cache_salt: str | None = None


def parse_task(
    form: TaskForm,
    task_id: str | int | None,
    body: dict[str, Any],
    defaults: Mapping[str, Any],
    seed: int | None,
) -> Task:
    """Parse the body of a completion or of a chat. `defaults` are sampling parameters, and `seed` the seed,
    of a body that does not have them. Raises RequestError naming the field, its value and what is allowed."""
    body = {k: v for k, v in body.items() if v is not None}
    model = body.get("model")
    require_field(model is None or isinstance(model, str), "model", model, "a string")
    common = {
        "model": model,
        "return_token_ids": is_flag_set(body, "return_token_ids", default=False),
        "has_id_names": is_flag_set(body, "return_tokens_as_token_ids", default=False),
        "cache_salt": read_cache_salt(body),
    }
    if form == "chat":
        toolbox = parse_toolbox(body)
        if toolbox is not None and toolbox.forced_name is not None:
            body.pop("response_format", None)  # of a text, which a reply of calls does not have
        params = parse_sampling_params(
            _chat_sampling_fields(body), {**FORM_DEFAULTS["chat"], **defaults}, seed
        )
        reasoning, structured_outputs = (
            is_flag_set(body, "include_reasoning", default=True),
            params.structured_outputs,
        )
        is_free = structured_outputs is None or toolbox is None or not toolbox.is_forced
        require_field(
            is_free, "tool_choice", body.get("tool_choice"), "none or auto beside what the output must be"
        )
        chat = parse_chat_task("chat", task_id, params, body)
        return replace(chat, include_reasoning=reasoning, toolbox=toolbox, **common)
    require_field("prompt" in body, "prompt", None, "a string or a list of token ids")
    params = parse_sampling_params(
        _sampling_fields(body, COMPLETION_FIELDS), {**FORM_DEFAULTS["completion"], **defaults}, seed
    )
    prompt = parse_prompt("prompt", body["prompt"])
    return Task("completion", task_id, params, prompt=prompt, **common)


def read_cache_salt(fields: Mapping[str, Any]) -> str | None:
    """Return the cache salt of a body or a line. Raises RequestError for what cannot be one."""
    salt = fields.get("cache_salt")
    require_field(is_cache_salt(salt), "cache_salt", salt, SALT_FORM)
    return salt


def tokenize_prompt(
    task: Task, tokenizer: Tokenizer | None, max_tokens: int, now: datetime | None = None
) -> list[int]:
    """Return a task's prompt as at most `max_tokens` token ids. `now` is the time that chat templates see.
    Raises ChatTemplateError, and ValueError for a prompt that is too long, or for text without a
    tokenizer."""
    if isinstance(task.prompt, list):
        return task.prompt
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give the prompt as token ids")
    if task.messages is not None:
        tools = None if task.toolbox is None else task.toolbox.body_tools
        return tokenize_chat(
            tokenizer, task.messages, max_tokens, now=now, tools=tools, **task.template_variables
        )
    assert task.prompt is not None
    return tokenizer.encode(task.prompt, max_tokens=max_tokens)


def task_sampling_params(task: Task, dialect: Dialect, prompt_ids: Sequence[int]) -> SamplingParams:
    """Return a task's sampling parameters.

    If marks of reasoning or calls are special tokens, a chat's text keeps special tokens, so that its parts
    can be found. A grammar constrains calls that must come, and an answer after its reasoning. Raises
    RequestError for tools if the model's format of calls is unknown, and ValueError for a constraint that is
    no grammar.
    """
    params, toolbox = task.params, task.toolbox
    if task.form != "chat":
        return params
    has_special_marks = dialect.has_special_reasoning_marks
    params = constrain_answer(params, dialect, prompt_ids)
    if toolbox is not None and toolbox.tools:
        has_special_marks = dialect.has_special_call_marks or has_special_marks
        if toolbox.is_forced:
            params = replace(params, structured_outputs=dialect.call_grammar(toolbox, prompt_ids))
    return replace(params, skip_special_tokens=False) if has_special_marks else params


def constrain_answer(params: SamplingParams, dialect: Dialect, prompt_ids: Sequence[int]) -> SamplingParams:
    """Return parameters whose grammar, if any, begins after the reasoning; the text keeps its marks. Raises
    ValueError for a constraint that is no grammar."""
    if params.structured_outputs is None:
        return params
    structured_outputs = dialect.grammar_with_reasoning(params.structured_outputs, prompt_ids)
    if structured_outputs is params.structured_outputs:
        return params
    skips = params.skip_special_tokens and not dialect.has_special_reasoning_marks
    return replace(params, structured_outputs=structured_outputs, skip_special_tokens=skips)


def drop_neutral_fields(
    body: dict[str, Any], known: frozenset[str], others: frozenset[str]
) -> dict[str, Any]:
    """Return the fields of a body that have an effect: sampling parameters, and unknown names.

    Fields of the neutral table are dropped. Raises RequestError for one whose value asks for something.
    """
    fields = {}
    for name, value in body.items():
        if name in NEUTRAL["body"] and name not in known | others:
            allowed = " or ".join(json.dumps(x) for x in NEUTRAL["body"][name])
            require_field(is_among(value, NEUTRAL["body"][name]), name, value, f"only {allowed} is supported")
        elif name not in HARMLESS_FIELDS | others:
            fields[name] = value
    return fields


def _sampling_fields(body: dict[str, Any], others: frozenset[str]) -> dict[str, Any]:
    """Return the sampling parameters of a body. Raises RequestError for other fields that ask for
    something."""
    fields = drop_neutral_fields(with_structured_outputs(body), BODY_PARAM_NAMES, others)
    refuse_unknown_fields(fields, BODY_PARAM_NAMES, others)
    extra = body.get("vllm_xargs")
    require_field(
        extra is None or "extra_args" not in fields, "vllm_xargs", extra, "one of it and extra_args"
    )
    return fields if extra is None else {"extra_args": extra} | fields


def refuse_unknown_fields(
    fields: Mapping[str, Any], known: frozenset[str], others: frozenset[str] = frozenset()
) -> None:
    """Raise RequestError for a field that is not among the `known`."""
    for name in (name for name in fields if name not in known):
        near = nearest_name(name, known | others)
        hint = f"; did you mean {near}?" if near else ""
        raise RequestError("invalid_request", f"{name[:60]} is not supported in a body{hint}")


def _chat_sampling_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat. `max_completion_tokens` and `logprobs` are translated."""
    fields = _sampling_fields(body, CHAT_FIELDS)
    if "max_completion_tokens" in body:
        fields["max_tokens"] = body["max_completion_tokens"]
    has_logprobs, top = is_flag_set(body, "logprobs", default=False), body.get("top_logprobs", 0)
    require_field(has_logprobs or is_among(top, (0,)), "top_logprobs", top, "only with logprobs true")
    return fields | ({"logprobs": top} if has_logprobs else {})


def parse_sampling_params(
    fields: dict[str, Any], defaults: Mapping[str, Any], seed: int | None
) -> SamplingParams:
    merged = {**defaults, **fields}
    for name in ("stop", "bad_words"):
        strings = merged.get(name)
        is_short = not isinstance(strings, list) or len(strings) <= MAX_STRINGS
        require_field(is_short, name, strings, f"at most {MAX_STRINGS} strings")
    if merged.get("seed") is None:
        merged["seed"] = seed
    try:
        params = SamplingParams.from_dict(merged)
    except (TypeError, ValueError) as error:
        raise RequestError("invalid_request", str(error)[:500], error_param(error)) from None
    except RecursionError:
        raise RequestError("invalid_request", "a field of the body is nested too deeply") from None
    require_field(params.n <= MAX_CHOICES, "n", params.n, f"1 to {MAX_CHOICES}")
    return params


def error_param(error: Exception) -> str | None:
    """Return the sampling parameter that an error's message begins with."""
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    return name if name in SAMPLING_PARAM_NAMES else None


def make_task_error(task: Task, error: Exception) -> RequestError:
    """Return the error of a task with the field of its body: a grammar of calls belongs to `tools`."""
    message, name = str(error), error_param(error)
    if name == "structured_outputs" and task.toolbox is not None and task.toolbox.is_forced:
        message, name = message.replace(name, "tools", 1), "tools"
    return RequestError("invalid_request", message, name)


def parse_template_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a body sets. Raises RequestError for a variable
    that a body may not set."""
    variables, effort = fields.get("chat_template_kwargs") or {}, fields.get("reasoning_effort")
    require_field(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
    require_field(effort in (None, *EFFORTS), "reasoning_effort", effort, " or ".join(EFFORTS))
    variables = {**effort_variables(effort), **variables}
    reserved = sorted(RESERVED_VARIABLES.intersection(variables))
    require_field(not reserved, "chat_template_kwargs", reserved, "other variables of the template")
    return variables


def parse_chat_task(
    form: TaskForm, task_id: str | int | None, params: SamplingParams, fields: dict[str, Any]
) -> Task:
    variables = parse_template_variables(fields)
    try:
        messages = normalise_messages(fields.get("messages"))
    except ChatTemplateError as error:
        raise RequestError("invalid_request", str(error)) from None
    return Task(form, task_id, params, messages=messages, template_variables=variables)


def list_prompt_values(value: Any) -> list[Any]:
    """Return prompts as a list. `value` is one text or list of token ids, or a list of several."""
    is_batch = isinstance(value, list) and value and isinstance(value[0], (str, list))
    return value if is_batch else [value]


def parse_prompt(name: str, value: Any) -> str | list[int]:
    """Return a text or token ids; OpenAI's clients also send either in a list of one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        require_field(len(value) == 1, name, value, "one prompt a line; give each its own")
        value = value[0]
    is_token_ids = isinstance(value, list) and all(type(i) is int for i in value)
    require_field(is_token_ids or isinstance(value, str), name, value, "a string or a list of token ids")
    return value
