"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from ....neutral_values import NEUTRAL
from ....option_fields import knob
from ....refusals import is_among
from ...text.openai.body_fields import MODEL_HELP, EchoFields, Message, StreamFields, field_names
from ...text.openai.errors import RequestError, is_flag_set, require_field
from ...text.openai.fields import parse_toolbox
from ...text.openai.schemas import Body
from ...text.openai.tasks import (
    BODY_PARAM_NAMES,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    drop_neutral_fields,
    parse_template_variables,
    refuse_unknown_fields,
)
from ...text.tokenizer.chats.chat import normalise_messages, tokenize_chat
from ...text.tokenizer.tokenizer import Tokenizer
from ..service.errors import HttpError, json_response
from ..service.service import Service
from .client_bodies import admit_body
from .openapi import READ_ERRORS, ApiRoute

MAX_TEXT_TOKENS = 1 << 17  # tokens of a text


# Fields of messages: with a text they may only have values without an effect.
MESSAGE_FIELDS = (
    "tools", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizeFields:
    """A text, or messages. Other fields of a completion or of a chat do not change the prompt."""

    prompt: str | None = knob(None, "text")
    messages: Sequence[Message] | None = knob(None, "a conversation, in place of a text")
    model: str | None = knob(None, MODEL_HELP)
    tools: Sequence[Mapping[str, Any]] | None = knob(None, "functions that the reply may call; of messages")
    chat_template_kwargs: Mapping[str, Any] | None = knob(None, "variables of the template; of messages")
    reasoning_effort: str | None = knob(None, "a variable of the template; of messages")
    add_special_tokens: bool | None = knob(
        None, "as before a completion: true for a text; false for messages, whose template writes them"
    )
    add_generation_prompt: bool | None = knob(True, "begin a reply; of messages")
    continue_final_message: bool | None = knob(False, "end in the last message's text; of messages")
    return_token_strs: bool | None = knob(False, "give each token too, as the vocabulary writes it")


@dataclass(frozen=True)
class DetokenizeFields:
    """Tokens of a text."""

    tokens: Sequence[int] = field(metadata={"help": "token ids"})
    model: str | None = knob(None, MODEL_HELP)


# Fields that a body of /tokenize may have: the body of a completion or of a chat is accepted too.
TOKENIZE_FIELDS = (
    field_names(TokenizeFields)
    | BODY_PARAM_NAMES
    | COMPLETION_FIELDS
    | CHAT_FIELDS
    | field_names(StreamFields)
    | field_names(EchoFields)
)


class Tokenized(TypedDict):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Special tokens and chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class TokenRoutes:
    """Routes of a service's tokenizer."""

    def __init__(self, service: Service):
        self.service, errors = service, (*READ_ERRORS, 404, 501)
        text = Body("TokenizeBody", (TokenizeFields,), {"prompt": "sort a list", "return_token_strs": True})
        ids = Body("DetokenizeBody", (DetokenizeFields,), {"tokens": [72, 105]})
        self.routes = [
            ApiRoute(
                "/tokenize", partial(self._answer, self.tokenize), "text or messages as token ids",
                reply=Tokenized, body=text, errors=errors,
            ),
            ApiRoute(
                "/detokenize", partial(self._answer, self.detokenize), "token ids as text",
                reply=Detokenized, body=ids, errors=errors,
            ),
            ApiRoute(
                "/tokenizer_info", self.show_tokenizer, "the tokenizer", reply=TokenizerInfo, errors=[501]
            ),
        ]  # fmt: skip

    async def _answer(self, reply: Callable[[dict[str, Any]], dict[str, Any]], request: Request) -> Response:
        """Answer a request with `reply` of its body. Both are converted in another thread, since they may be
        long."""
        async with admit_body(request, self.service.admission) as client_body:
            return await client_body.run_in_thread(lambda: json_response(reply(client_body.parse_object())))

    async def show_tokenizer(self, request: Request) -> Response:
        tokenizer = self._tokenizer
        special_tokens = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
        }
        return json_response(special_tokens | {"chat_template": tokenizer.chat_template})

    @property
    def _tokenizer(self) -> Tokenizer:
        if (tokenizer := self.service.llm.tokenizer) is None:
            raise HttpError(501, "the model has no tokenizer", "no_tokenizer")
        return tokenizer

    def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_fields(body, field_names(DetokenizeFields))
        ids, size = body.get("tokens"), self.service.llm.config.vocab_size
        is_known = isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)
        require_field(
            is_known and len(ids or []) <= MAX_TEXT_TOKENS,
            "tokens",
            ids,
            f"a list of at most {MAX_TEXT_TOKENS} token ids below {size}",
        )
        return {"prompt": self._tokenizer.decode(ids)}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_fields(body, TOKENIZE_FIELDS)
        ids = self._encode_body(body)
        reply = {"count": len(ids), "max_model_len": self.service.max_model_len, "tokens": ids}
        if is_flag_set(body, "return_token_strs", default=False):
            reply["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
        return reply

    def _check_fields(self, body: Mapping[str, Any], known: frozenset[str]) -> None:
        """Raise RequestError for an unknown field with an effect, and HttpError for an unknown model."""
        stated = {name: value for name, value in body.items() if value is not None}
        refuse_unknown_fields(drop_neutral_fields(stated, known, known), known)
        if (model := stated.get("model")) is not None:
            require_field(isinstance(model, str), "model", model, "a string")
            self.service.require_model(model)

    def _encode_body(self, body: dict[str, Any]) -> list[int]:
        try:
            ids = self._encode_text_or_chat(body)
            if len(ids) > MAX_TEXT_TOKENS:
                raise ValueError(f"the text has {len(ids)} tokens, at most {MAX_TEXT_TOKENS} are allowed")
            return ids
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError("invalid_request", str(error)) from None

    def _encode_text_or_chat(self, body: dict[str, Any]) -> list[int]:
        text: Any = body.get("prompt")
        if body.get("messages") is not None:
            require_field(text is None, "prompt", text, "one of prompt and messages")
            return self._encode_chat(body)
        require_field(isinstance(text, str), "prompt", text, "a string")
        for name in MESSAGE_FIELDS:
            value, neutral = body.get(name), NEUTRAL["body"].get(name, ())
            require_field(is_among(value, (None, *neutral)), name, value, "only with messages")
        special = is_flag_set(body, "add_special_tokens", default=True)
        return self._tokenizer.encode(text, add_special_tokens=special, max_tokens=MAX_TEXT_TOKENS)

    def _encode_chat(self, body: dict[str, Any]) -> list[int]:
        goes_on = is_flag_set(body, "continue_final_message", default=False)
        toolbox = parse_toolbox({"tools": body.get("tools")})
        options = {
            "add_special_tokens": is_flag_set(body, "add_special_tokens", default=False),
            "add_generation_prompt": is_flag_set(body, "add_generation_prompt", default=not goes_on),
            "continue_final_message": goes_on,
            "tools": toolbox and toolbox.body_tools,
        }
        messages = normalise_messages(body["messages"])
        return tokenize_chat(
            self._tokenizer, messages, MAX_TEXT_TOKENS, **options, **parse_template_variables(body)
        )
