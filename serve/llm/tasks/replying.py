"""Replies to chats with tools, in the form of OpenAI's API.

Each `message` may have `tool_calls` and reasoning beside its content, and can be appended to the
conversation.
`tools` and `tool_choice` are those of a request to the server.
"""

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from ....sampling.params import SamplingParams
from ...text.openai.fields import toolbox_of
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, params_for, prompt_ids
from ...text.tokenizer.chat import Message, check_messages
from ..bar import Tqdm
from ..input_processor import InputProcessor
from ..session import Session


def task_of(
    messages: list[Message],
    params: SamplingParams,
    tools: dict[str, Any],
    variables: Mapping[str, Any] | None,
) -> Task:
    """Check a conversation; `tools` are fields of a body, `variables` those of the chat template. Raises
    ValueError for what is not allowed."""
    checked, toolbox = check_messages(messages), toolbox_of(tools)
    own = dict(variables or {})
    return Task("chat", None, params, messages=checked, template_variables=own, toolbox=toolbox)


def reply(
    session: Session, processor: InputProcessor, task: Task, parser: str | None, use_tqdm: Tqdm
) -> list[dict[str, Any]]:
    """Return the choices of a reply. Ids of tool calls are hashes of the prompt and the seed; `parser` is the
    notation of calls, by default the chat template's."""
    replies = Replies("", processor.tokenizer, parser)
    prompt = prompt_ids(task, processor.tokenizer, processor.longest)
    params = params_for(task, replies.dialect, prompt)
    make = partial(processor.group, prompt=prompt, params=params, awaited=False)
    (group,) = session.complete([make], use_tqdm)
    key = sha256(msgspec.json.encode((prompt, params.seed))).hexdigest()
    return replies.body(key, task, processor.output(group))["choices"]
