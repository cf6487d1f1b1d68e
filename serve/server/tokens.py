"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..openai.reading import object_of
from ..openai.tasks import RequestError, require
from ..text.chat import ChatTemplateError, apply_chat, check_messages
from ..text.tokenizer import Tokenizer
from .body import read_body
from .errors import HttpError, json_response
from .service import Service

MOST = 1 << 17  # tokens of a text: encoding holds the interpreter


class Tokens:
    """Endpoints around a service's tokenizer."""

    def __init__(self, service: Service):
        self.service = service

    async def tokenize(self, request: Request) -> Response:
        body = object_of(await read_body(request, self.service.options), "body")
        return json_response(await asyncio.to_thread(self._tokenized, body))

    async def detokenize(self, request: Request) -> Response:
        body = object_of(await read_body(request, self.service.options), "body")
        ids, size = body.get("tokens"), self.service.llm.config.vocab_size
        known = isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)
        require(known, "tokens", ids, f"a list of token ids below {size}")
        return json_response({"prompt": await asyncio.to_thread(self._tokenizer.decode, ids)})

    async def info(self, request: Request) -> Response:
        own = self._tokenizer
        named = {"bos_token": own.bos_token, "eos_token": own.eos_token, "pad_token": own.pad_token}
        return json_response(named | {"chat_template": own.chat_template})

    @property
    def _tokenizer(self) -> Tokenizer:
        if (found := self.service.llm.tokenizer) is None:
            raise HttpError(501, "the model has no tokenizer", "no_tokenizer")
        return found

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self._ids(body)
        found = {"count": len(ids), "max_model_len": self.service.max_model_len, "tokens": ids}
        if body.get("return_token_strs"):
            found["token_strs"] = [self._tokenizer.decode_token(i) for i in ids]
        return found

    def _ids(self, body: dict[str, Any]) -> list[int]:
        special = body.get("add_special_tokens")
        require(special in (None, True, False), "add_special_tokens", special, "true or false")
        try:
            return self._encoded(body, special is not False)
        except (ChatTemplateError, ValueError) as error:
            raise RequestError("invalid_request", str(error)) from None

    def _encoded(self, body: dict[str, Any], special: bool) -> list[int]:
        if body.get("messages") is not None:
            generation = body.get("add_generation_prompt", True)
            require(isinstance(generation, bool), "add_generation_prompt", generation, "true or false")
            messages = check_messages(body["messages"])
            return apply_chat(self._tokenizer, messages, MOST, add_generation_prompt=generation)
        text: Any = body.get("prompt")
        require(isinstance(text, str), "prompt", text, "a string")
        return self._tokenizer.encode(text, add_special_tokens=special, most=MOST)
