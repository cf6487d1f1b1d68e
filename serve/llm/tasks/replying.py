"""Replies to chats with tools, in the form of OpenAI's API."""

from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from ....sampling.params import SamplingParams
from ...text.openai.fields import toolbox_of
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, params_for, prompt_ids
from ...text.tokenizer.chat import Message, check_messages
from ..bar import Tqdm

if TYPE_CHECKING:
    from ..llm import LLM


def reply(
    llm: "LLM",
    messages: list[Message],
    sampling_params: SamplingParams | None = None,
    use_tqdm: Tqdm = False,
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    tool_call_parser: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Replies to a conversation as OpenAI's API has them, `n` choices: each `message` may have `tool_calls`
    and reasoning beside its content, and goes on in the conversation as it is.

    Tools, and which may be called, are as in a request to the server; `tool_call_parser` names the notation
    of calls, by default the chat template's. The ids of calls come of the prompt and the seed.

    Raises ValueError for what is not allowed, and ChatTemplateError as `chat`.
    """
    choice = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
    task = Task(
        "chat",
        None,
        llm.get_default_sampling_params() if sampling_params is None else sampling_params,
        messages=check_messages(messages),
        template_variables=dict(chat_template_kwargs or {}),
        toolbox=toolbox_of({"tools": tools, **choice}),
    )
    replies = Replies("", llm.tokenizer, tool_call_parser)
    prompt = prompt_ids(task, llm.tokenizer, llm.longest_prompt)
    params = params_for(task, replies.dialect, prompt)
    (result,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm)
    key = sha256(msgspec.json.encode((prompt, params.seed))).hexdigest()
    return replies.body(key, task, result)["choices"]
