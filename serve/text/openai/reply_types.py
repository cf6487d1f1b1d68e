"""What replies hold, for those who read them: types of the JSON that `replies.py` writes."""

from typing import Any, Literal, NotRequired, TypedDict


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[CachedTokens]


class Ending(TypedDict):
    """The end of a choice; token ids where they are wanted, or there is no text, and from which of them on
    which version of the weights made them."""

    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    weights: NotRequired[list[tuple[int, int]]]


class TextLogprobs(TypedDict):
    """Log-probabilities of a text's tokens, and of the likeliest at each place."""

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
    """Continuations of one or more prompts; as an event of a stream, what is new of them."""

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
    """That of a token of the reply, and those of the likeliest at its place."""

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
    """What is new of a call; its first one has its id and name."""

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
    """What is new of a reply."""

    index: int
    delta: ReplyDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """An event of a stream: what is new of replies; the last event is `[DONE]`."""

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
    """A sentence for people, the field that is wrong, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """What is answered instead."""

    error: Failure
