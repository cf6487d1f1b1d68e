"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from ....fields import knob
from ...text.openai.bodies import Message
from ...text.openai.errors import RequestError, flag, object_of, require
from ...text.openai.fields import toolbox_of
from ...text.openai.schemas import Body
from ...text.tokenizer.chat import apply_chat, check_messages
from ...text.tokenizer.tokenizer import Tokenizer
from ..service.errors import HttpError, json_response
from ..service.service import Service
from .body import read_body
from .openapi import READ_ERRORS, Path

MOST = 1 << 17  # tokens of a text


@dataclass(frozen=True)
class TokenizeFields:
    """A text, or messages."""

    prompt: str | None = knob(None, "text")
    messages: Sequence[Message] | None = knob(None, "a conversation, in place of a text")
    tools: Sequence[Mapping[str, Any]] | None = knob(None, "functions that the reply may call; of messages")
    add_special_tokens: bool | None = knob(True, "as before a completion; of a text")
    add_generation_prompt: bool | None = knob(True, "begin a reply; of messages")
    return_token_strs: bool | None = knob(False, "give each token's text too")


@dataclass(frozen=True)
class DetokenizeFields:
    """Tokens of a text."""

    tokens: Sequence[int] = field(metadata={"help": "token ids"})


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
    """Routes around the tokenizer of a service."""

    def __init__(self, service: Service):
        self.service, errors = service, (*READ_ERRORS, 501)
        text = Body("TokenizeBody", (TokenizeFields,), {"prompt": "sort a list", "return_token_strs": True})
        ids = Body("DetokenizeBody", (DetokenizeFields,), {"tokens": [72, 105]})
        self.paths = [
            Path(
                "/tokenize", partial(self._answer, self._tokenized), "text or messages as token ids",
                reply=Tokenized, body=text, errors=errors,
            ),
            Path(
                "/detokenize", partial(self._answer, self._detokenized), "token ids as text",
                reply=Detokenized, body=ids, errors=errors,
            ),
            Path("/tokenizer_info", self.info, "the tokenizer", reply=TokenizerInfo, errors=[501]),
        ]  # fmt: skip

    async def _answer(self, reply: Callable[[dict[str, Any]], dict[str, Any]], request: Request) -> Response:
        """Read and write in another thread: bodies and replies may be long."""
        body = await read_body(request, self.service.options)
        return await asyncio.to_thread(lambda: json_response(reply(object_of(body, "body"))))

    async def info(self, request: Request) -> Response:
        own = self._tokenizer
        named = {"bos_token": own.bos_token, "eos_token": own.eos_token, "pad_token": own.pad_token}
        return json_response(named | {"chat_template": own.chat_template})

    @property
    def _tokenizer(self) -> Tokenizer:
        if (found := self.service.llm.tokenizer) is None:
            raise HttpError(501, "the model has no tokenizer", "no_tokenizer")
        return found

    def _detokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, size = body.get("tokens"), self.service.llm.config.vocab_size
        known = isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)
        require(
            known and len(ids or []) <= MOST,
            "tokens",
            ids,
            f"a list of at most {MOST} token ids below {size}",
        )
        return {"prompt": self._tokenizer.decode(ids)}

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self._ids(body)
        found = {"count": len(ids), "max_model_len": self.service.max_model_len, "tokens": ids}
        if flag(body, "return_token_strs", default=False):
            found["token_strs"] = [self._tokenizer.decode_token(i) for i in ids]
        return found

    def _ids(self, body: dict[str, Any]) -> list[int]:
        try:
            ids = self._encoded(body)
            if len(ids) > MOST:
                raise ValueError(f"the text has {len(ids)} tokens, at most {MOST} are allowed")
            return ids
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError("invalid_request", str(error)) from None

    def _encoded(self, body: dict[str, Any]) -> list[int]:
        if body.get("messages") is not None:
            generation = flag(body, "add_generation_prompt", default=True)
            messages, toolbox = check_messages(body["messages"]), toolbox_of({"tools": body.get("tools")})
            options = {"add_generation_prompt": generation, "tools": toolbox and toolbox.given}
            return apply_chat(self._tokenizer, messages, MOST, **options)
        text: Any = body.get("prompt")
        require(isinstance(text, str), "prompt", text, "a string")
        special = flag(body, "add_special_tokens", default=True)
        return self._tokenizer.encode(text, add_special_tokens=special, most=MOST)
