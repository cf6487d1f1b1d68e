"""Replies to chats with tools, in the form of OpenAI's API.

Each `message` may have `tool_calls` and reasoning in addition to its content, and can be appended to the
conversation. `tools` and `tool_choice` have the form of a request to the server.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec

from ....sampling.params import SamplingParams
from ...text.openai.fields import parse_toolbox
from ...text.openai.replies import Replies
from ...text.openai.tasks import Task, task_sampling_params, tokenize_prompt
from ...text.tokenizer.chats.chat import ChatMessage, normalise_messages
from ..input_processor import InputProcessor
from ..progress_bar import Tqdm
from ..session import Session


def make_chat_task(
    messages: list[ChatMessage],
    params: SamplingParams,
    tools: dict[str, Any],
    variables: Mapping[str, Any] | None,
) -> Task:
    """Check a conversation, and return its task. `tools` are a body's fields about tools, `variables` go to
    the chat template. Raises ValueError for what is not allowed."""
    checked_messages, toolbox = normalise_messages(messages), parse_toolbox(tools)
    template_variables = dict(variables or {})
    return Task(
        "chat",
        None,
        params,
        messages=checked_messages,
        template_variables=template_variables,
        toolbox=toolbox,
    )


def generate_reply(
    session: Session, processor: InputProcessor, task: Task, parser: str | None, use_tqdm: Tqdm
) -> list[dict[str, Any]]:
    """Generate a reply, and return its choices. Ids of tool calls are hashes of prompt and seed. `parser` is
    the name of the notation of calls; None is the chat template's."""
    replies = Replies("", processor.tokenizer, parser)
    prompt = tokenize_prompt(task, processor.tokenizer, processor.longest_prompt)
    params = task_sampling_params(task, replies.dialect, prompt)
    subscription = processor.make_subscription(prompt, params, is_awaited=False)
    session.submit_and_run([subscription], use_tqdm)
    key = sha256(msgspec.json.encode((prompt, params.seed))).hexdigest()
    return replies.reply_body(key, task, [subscription.make_output()])["choices"]
