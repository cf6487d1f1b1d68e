"""Fields of OpenAI's bodies that are no sampling parameters: names, types and help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ....option_fields import knob
from ..cache_salt import SALT_FORM
from ..tokenizer.chats.chat import EFFORTS

MODEL_HELP = "a name that the model is served under; it need not be given"
TOKEN_IDS_HELP = (
    "give token ids too: of the answer, and where it is whole of the prompt; and which weights made them"
)
TOKEN_NAMES_HELP = "name tokens of log-probabilities token_id:N, which is unique, and not by their texts"
RESUME_HELP = (
    "of an answer that may go on elsewhere: its id, created, and of one that has begun the token ids of each "
    "choice so far as outputs, their events, and their realm"
)


@dataclass(frozen=True)
class TextPart:
    """A part of a message's text."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True)
class Message:
    """A message; a chat template may read more fields."""

    role: str
    content: str | Sequence[TextPart] | None = None


@dataclass(frozen=True)
class ChatFields:
    """A conversation to reply to."""

    messages: Sequence[Message] = field(metadata={"help": "the conversation so far"})
    model: str | None = knob(None, MODEL_HELP)
    max_completion_tokens: int | None = knob(None, "the same as max_tokens")
    logprobs: bool | None = knob(False, "report each token's log-probability")
    top_logprobs: int | None = knob(None, "report so many alternatives too; only with logprobs true")
    chat_template_kwargs: Mapping[str, Any] | None = knob(None, "variables of the chat template")
    reasoning_effort: str | None = knob(None, f"a variable of the chat template: {' or '.join(EFFORTS)}")
    include_reasoning: bool | None = knob(True, "give the model's reasoning beside its answer")
    return_token_ids: bool | None = knob(False, TOKEN_IDS_HELP)
    return_tokens_as_token_ids: bool | None = knob(False, TOKEN_NAMES_HELP)


@dataclass(frozen=True)
class CacheFields:
    """Sharing of cached prompts."""

    cache_salt: str | None = knob(None, f"only requests with an equal one share cached pages: {SALT_FORM}")


@dataclass(frozen=True)
class FormatFields:
    """Constraints on the output, as an alternative to `structured_outputs`."""

    response_format: Mapping[str, Any] | None = knob(
        None, 'its type is "text", "json_object", or "json_schema" with json_schema.schema'
    )
    guided_json: Mapping[str, Any] | str | None = knob(None, "the same as structured_outputs.json")
    guided_regex: str | None = knob(None, "the same as structured_outputs.regex")
    guided_choice: Sequence[str] | None = knob(None, "the same as structured_outputs.choice")
    guided_grammar: str | None = knob(None, "the same as structured_outputs.grammar")


@dataclass(frozen=True)
class ProcessorFields:
    """vLLM's name of `extra_args`."""

    vllm_xargs: Mapping[str, Any] | None = knob(None, "the same as extra_args")


@dataclass(frozen=True)
class ToolFields:
    """Tools that a reply may call."""

    tools: Sequence[Mapping[str, Any]] | None = knob(None, "functions that the model may call")
    tool_choice: str | Mapping[str, Any] | None = knob(
        None, "none, auto (default), required, a function that must be called, or allowed_tools"
    )
    parallel_tool_calls: bool | None = knob(True, "false: at most one call")


@dataclass(frozen=True)
class CompletionFields:
    """A text to continue."""

    prompt: str | Sequence[int | str | Sequence[int]] = field(
        metadata={"help": "text or token ids, or a list of them"}
    )
    model: str | None = knob(None, MODEL_HELP)
    return_token_ids: bool | None = knob(False, TOKEN_IDS_HELP)
    return_tokens_as_token_ids: bool | None = knob(False, TOKEN_NAMES_HELP)


@dataclass(frozen=True)
class ResponseFields:
    """An input to respond to."""

    input: str | Sequence[Mapping[str, Any]] = field(
        metadata={
            "help": "a text, or items: messages of which all parts are text, earlier reasoning, calls of "
            "functions and their outputs"
        }
    )
    model: str | None = knob(None, MODEL_HELP)
    instructions: str | None = knob(None, "a first message of the system")
    max_output_tokens: int | None = knob(None, "the same as max_tokens")
    chat_template_kwargs: Mapping[str, Any] | None = knob(None, "variables of the chat template")
    include_reasoning: bool | None = knob(True, "give the model's reasoning as an item of its own")
    stream: bool | None = knob(False, "send what comes as server-sent events")
    text: Mapping[str, Any] | None = knob(
        None, 'its format is of type "text", "json_object", or "json_schema" with schema'
    )
    reasoning: Mapping[str, Any] | None = knob(
        None, "its effort is a variable of the chat template; a summary is not supported"
    )
    n: Literal[1] | None = knob(1, "a response has one answer")
    logprobs: Literal[False] | None = knob(False, "no log-probabilities are reported")
    resume: Mapping[str, Any] | None = knob(None, RESUME_HELP)


@dataclass(frozen=True)
class EmbeddingFields:
    """Texts to embed."""

    input: str | Sequence[int | str | Sequence[int]] = field(
        metadata={"help": "text or token ids, or a list of them"}
    )
    model: str | None = knob(None, MODEL_HELP)
    encoding_format: Literal["float", "base64"] | None = knob("float", "base64 is of little-endian float32")
    dimensions: int | None = knob(None, "how many of an embedding's first numbers; default: all")
    normalize: bool | None = knob(True, "give embeddings of length 1")
    pooling: Literal["last", "mean"] | None = knob(
        None, "the last token's hidden state, or the mean of all; default: the model's own"
    )


@dataclass(frozen=True)
class StreamFields:
    """Delivery of a server's answer."""

    stream: bool | None = knob(False, "send tokens as they come, as server-sent events")
    stream_options: Mapping[str, Any] | None = knob(
        None, "include_usage true: the last event counts tokens; only with stream true"
    )
    resume: Mapping[str, Any] | None = knob(None, RESUME_HELP)


@dataclass(frozen=True)
class EchoFields:
    """Fields of completions alone."""

    echo: bool | None = knob(False, "put the prompt in front; with max_tokens 0 there is nothing else")


def field_names(record: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(record))
