"""Types of the JSON that `replies.py` writes, for the OpenAPI document."""

from typing import Any, Literal, NotRequired, TypedDict


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]


class Ending(TypedDict):
    """The end of a choice. Token ids are there if they are asked for, or without text; `weights` lists from
    which token on which version of the weights was used."""

    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    weights: NotRequired[list[tuple[int, int]]]


class TextLogprobs(TypedDict):
    """Log-probabilities of a text's tokens, and of the likeliest at each position."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Ending):
    """A continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Continuations of one or more prompts; in a stream, their new parts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    """A token's log-probability; its bytes where they are known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """Log-probability of a reply's token, and those of the likeliest at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]


class CalledFunction(TypedDict):
    """A function's name, and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Reply(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Ending):
    """A reply."""

    index: int
    message: Reply
    logprobs: ChatLogprobs | None


class ChatCompletion(TypedDict):
    """Replies to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """New part of a call; the first one has id and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ReplyDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatDelta(TypedDict):
    """New part of a reply."""

    index: int
    delta: ReplyDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """An event of a stream, with new parts of replies; the last event is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: NotRequired[Usage | None]


class ResponseReply(TypedDict):
    """A response; items of its output are reasoning, a message, and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class ResponseEvent(TypedDict):
    """An event of a stream, with fields by its type."""

    type: str
    sequence_number: int


class Embedding(TypedDict):
    """The embedding of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(TypedDict):
    """Embeddings in the order of their inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Failure(TypedDict):
    """An error: a message, the field that is wrong, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The answer to a request that failed."""

    error: Failure
