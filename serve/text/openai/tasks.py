"""Tasks: parsed requests of OpenAI's API, with vLLM's further fields."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from ....model.pooling import PoolingParams
from ....neutral import HARMLESS, NEUTRAL
from ....refusals import among, nearest
from ....sampling.params import SamplingParams
from ..tokenizer.chat import (
    EFFORTS,
    TEMPLATE_OWN,
    ChatTemplateError,
    apply_chat,
    check_messages,
    effort_variables,
)
from ..tokenizer.tokenizer import Tokenizer
from ..tools.tool import Toolbox
from .bodies import ChatFields, CompletionFields, FormatFields, ProcessorFields, ToolFields, names
from .dialect import Dialect
from .errors import RequestError, flag, require
from .fields import toolbox_of, with_structured

Form = Literal["plain", "completion", "chat", "embedding"]
MAX_CHOICES = 128  # completions of one request: OpenAI's limit
MAX_STRINGS = 1024  # stop strings or bad words: each is searched at every token

SAMPLING = frozenset(f.name for f in dataclasses.fields(SamplingParams) if f.metadata.get("flag", True))
EITHER = names(FormatFields) | names(ProcessorFields)
CHAT = names(ChatFields) | names(ToolFields) | EITHER
COMPLETION = names(CompletionFields) | EITHER
# Results of these have no place in OpenAI's answers.
PLAIN_ONLY = frozenset({"prompt_logprobs", "detokenize"})
BODY = SAMPLING - PLAIN_ONLY
# Defaults of bodies, unless the model's authors recommend others.
DEFAULTS: dict[Form, dict[str, Any]] = {"chat": {"max_tokens": None}, "completion": {"max_tokens": 16}}


@dataclass(frozen=True)
class Task:
    """A request for a completion, a chat or an embedding.

    model: name that it gives the model, if any
    pooling: how its prompt is embedded
    reasoning: whether the reply has the model's reasoning
    ids: whether the reply has token ids
    now: time that the chat template sees, of a resumed answer
    known: token ids of its completions so far, of a resumed answer
    source: address of the engine that prefills its prompt, if a router has chosen one
    """

    form: Form
    id: str | int | None
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    toolbox: Toolbox | None = None
    model: str | None = None
    pooling: PoolingParams | None = None
    reasoning: bool = True
    ids: bool = False
    now: datetime | None = None
    known: tuple[tuple[int, ...], ...] = ()
    source: str | None = None


def task_of_body(
    form: Form, name: str | int | None, body: dict[str, Any], defaults: Mapping[str, Any], seed: int | None
) -> Task:
    """Parse the body of a completion or of a chat. `defaults` are sampling parameters, and `seed` the seed,
    of a body that does not have them. Raises RequestError naming the field, its value and what is allowed."""
    body = {k: v for k, v in body.items() if v is not None}
    model = body.get("model")
    require(model is None or isinstance(model, str), "model", model, "a string")
    ids = flag(body, "return_token_ids", default=False)
    if form == "chat":
        toolbox = toolbox_of(body)
        if toolbox is not None and toolbox.only is not None:
            body.pop("response_format", None)  # of a text, which a reply of calls does not have
        params = sampling_of(_chat_fields(body), {**DEFAULTS["chat"], **defaults}, seed)
        reasoning, shape = flag(body, "include_reasoning", default=True), params.structured_outputs
        is_free = shape is None or toolbox is None or not toolbox.is_forced
        require(
            is_free, "tool_choice", body.get("tool_choice"), "none or auto beside what the output must be"
        )
        chat = chat_of("chat", name, params, body)
        return replace(chat, model=model, reasoning=reasoning, toolbox=toolbox, ids=ids)
    require("prompt" in body, "prompt", None, "a string or a list of token ids")
    params = sampling_of(_body_fields(body, COMPLETION), {**DEFAULTS["completion"], **defaults}, seed)
    return Task("completion", name, params, prompt=prompt_of("prompt", body["prompt"]), model=model, ids=ids)


def prompt_ids(task: Task, tokenizer: Tokenizer | None, most: int, now: datetime | None = None) -> list[int]:
    """Return a task's prompt as at most `most` token ids. `now` is the time that chat templates see. Raises
    ChatTemplateError, and ValueError for a prompt that is too long, or for text without a tokenizer."""
    if isinstance(task.prompt, list):
        return task.prompt
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: give the prompt as token ids")
    if task.messages is not None:
        tools = None if task.toolbox is None else task.toolbox.given
        return apply_chat(tokenizer, task.messages, most, now=now, tools=tools, **task.template_variables)
    assert task.prompt is not None
    return tokenizer.encode(task.prompt, most=most)


def params_for(task: Task, dialect: Dialect, prompt_ids: Sequence[int]) -> SamplingParams:
    """Return a task's sampling parameters. A chat's text keeps special tokens if marks are among them, so
    that its parts can be found; calls that must come are constrained, and so is an answer after its
    reasoning. Raises RequestError for tools if the model's format of calls is unknown, and ValueError for a
    constraint that is no grammar."""
    params, toolbox = task.params, task.toolbox
    if task.form != "chat":
        return params
    keeps = dialect.keeps_special
    params = constrained(params, dialect, prompt_ids)
    if toolbox is not None and toolbox.tools:
        keeps = dialect.calls_special or keeps
        if toolbox.is_forced:
            params = replace(params, structured_outputs=dialect.constraints(toolbox, prompt_ids))
    return replace(params, skip_special_tokens=False) if keeps else params


def constrained(params: SamplingParams, dialect: Dialect, prompt_ids: Sequence[int]) -> SamplingParams:
    """Return parameters whose grammar, if any, begins after the reasoning; the text keeps its marks. Raises
    ValueError for a constraint that is no grammar."""
    if params.structured_outputs is None:
        return params
    shape = dialect.after_reasoning(params.structured_outputs, prompt_ids)
    if shape is params.structured_outputs:
        return params
    skips = params.skip_special_tokens and not dialect.keeps_special
    return replace(params, structured_outputs=shape, skip_special_tokens=skips)


def with_effect(given: dict[str, Any], known: frozenset[str], others: frozenset[str]) -> dict[str, Any]:
    """Return the fields that ask for something: sampling parameters, and unknown names. Raises RequestError
    for a field of the neutral table that asks for something."""
    fields = {}
    for name, value in given.items():
        if name in NEUTRAL["body"] and name not in known | others:
            allowed = " or ".join(json.dumps(x) for x in NEUTRAL["body"][name])
            require(among(value, NEUTRAL["body"][name]), name, value, f"only {allowed} is supported")
        elif name not in HARMLESS | others:
            fields[name] = value
    return fields


def _body_fields(body: dict[str, Any], others: frozenset[str]) -> dict[str, Any]:
    """Return the sampling parameters of a body. Raises RequestError for other fields that ask for
    something."""
    fields = with_effect(with_structured(body), BODY, others)
    refuse_unknown(fields, BODY, others)
    extra = body.get("vllm_xargs")
    require(extra is None or "extra_args" not in fields, "vllm_xargs", extra, "one of it and extra_args")
    return fields if extra is None else {"extra_args": extra} | fields


def refuse_unknown(
    fields: Mapping[str, Any], known: frozenset[str], others: frozenset[str] = frozenset()
) -> None:
    """Raise RequestError for a field that is not among the `known`."""
    for name in (name for name in fields if name not in known):
        near = nearest(name, known | others)
        hint = f"; did you mean {near}?" if near else ""
        raise RequestError("invalid_request", f"{name[:60]} is not supported in a body{hint}")


def _chat_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat, which has names and meanings of its own for some."""
    fields = _body_fields(body, CHAT)
    if "max_completion_tokens" in body:
        fields["max_tokens"] = body["max_completion_tokens"]
    wanted, top = flag(body, "logprobs", default=False), body.get("top_logprobs", 0)
    require(wanted or among(top, (0,)), "top_logprobs", top, "only with logprobs true")
    return fields | ({"logprobs": top} if wanted else {})


def sampling_of(fields: dict[str, Any], defaults: Mapping[str, Any], seed: int | None) -> SamplingParams:
    merged = {**defaults, **fields}
    for name in ("stop", "bad_words"):
        strings = merged.get(name)
        few = not isinstance(strings, list) or len(strings) <= MAX_STRINGS
        require(few, name, strings, f"at most {MAX_STRINGS} strings")
    if merged.get("seed") is None:
        merged["seed"] = seed
    try:
        params = SamplingParams.from_dict(merged)
    except (TypeError, ValueError) as error:
        raise RequestError("invalid_request", str(error)[:500], blamed(error)) from None
    require(params.n <= MAX_CHOICES, "n", params.n, f"1 to {MAX_CHOICES}")
    return params


def blamed(error: Exception) -> str | None:
    """Return the sampling parameter that an error's message begins with."""
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    return name if name in SAMPLING else None


def task_error(task: Task, error: Exception) -> RequestError:
    """Return the error of a task with the field of its body: a grammar of calls belongs to `tools`."""
    told, name = str(error), blamed(error)
    if name == "structured_outputs" and task.toolbox is not None and task.toolbox.is_forced:
        told, name = told.replace(name, "tools", 1), "tools"
    return RequestError("invalid_request", told, name)


def chat_of(form: Form, name: str | int | None, params: SamplingParams, fields: dict[str, Any]) -> Task:
    variables, effort = fields.get("chat_template_kwargs") or {}, fields.get("reasoning_effort")
    require(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
    require(effort in (None, *EFFORTS), "reasoning_effort", effort, " or ".join(EFFORTS))
    variables = {**effort_variables(effort), **variables}
    taken = sorted(TEMPLATE_OWN.intersection(variables))
    require(not taken, "chat_template_kwargs", taken, "other variables of the template")
    try:
        messages = check_messages(fields.get("messages"))
    except ChatTemplateError as error:
        raise RequestError("invalid_request", str(error)) from None
    return Task(form, name, params, messages=messages, template_variables=variables)


def listed(value: Any) -> list[Any]:
    """Return prompts as a list: one text or list of token ids, or several."""
    several = isinstance(value, list) and value and isinstance(value[0], (str, list))
    return value if several else [value]


def prompt_of(name: str, value: Any) -> str | list[int]:
    """Return a text or token ids; OpenAI's clients also send either in a list of one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        require(len(value) == 1, name, value, "one prompt a line; give each its own")
        value = value[0]
    ids = isinstance(value, list) and all(type(i) is int for i in value)
    require(ids or isinstance(value, str), name, value, "a string or a list of token ids")
    return value
