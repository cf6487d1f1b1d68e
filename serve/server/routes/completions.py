"""/v1/completions, /v1/chat/completions and /v1/responses."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...text.openai.reading import object_of
from ...text.openai.replies import PREFIXES, Replies
from ...text.openai.reply_types import ChatChunk, ChatCompletion, Completion, ResponseEvent, ResponseReply
from ...text.openai.resume import END, Resume
from ...text.openai.schemas import body_of
from ...text.outputs import CompletionOutput, RequestOutput
from ..service.errors import HttpError, json_response
from ..service.service import ApiCall, Service
from ..service.streams import ClientLeft, while_read
from ..streams import completion_stream, responses_stream
from ..streams.completion_request import CompletionRequest, asked_of, asked_of_response
from ..streams.completion_stream import PING
from ..streams.resume_stream import SELDOM, TokenReporter, WholeEvent
from .body import SOURCE, read_body
from .openapi import READ_ERRORS, Path

LONG = 1 << 14  # bytes of a body that is read in another thread
MOST_SHOWN = 200  # characters of a realm in an error


class EventWriter(Protocol):
    """Writes the events of a stream."""

    def begin(self) -> bytes: ...

    def chunks(self, outputs: list[CompletionOutput], /) -> bytes: ...

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes: ...

    def failed(self, error: dict[str, Any], /) -> bytes: ...

    def went_before(self, outputs: list[CompletionOutput], count: int, /) -> None: ...


@dataclass(frozen=True)
class Api:
    """How a path's bodies are read, given sampling parameters that they need not have, and its answers
    written: whole, or as events; `prefix` is that of their ids."""

    prefix: str
    asked: Callable[[dict[str, Any], Mapping[str, Any]], CompletionRequest]
    whole: Callable[[Replies, str, CompletionRequest, list[RequestOutput]], dict[str, Any]]
    events: Callable[[Replies, str, CompletionRequest, list[int]], EventWriter]


COMPLETION = Api(
    PREFIXES["completion"],
    partial(asked_of, "completion"),
    completion_stream.whole,
    completion_stream.CompletionEvents,
)
CHAT = Api(
    PREFIXES["chat"], partial(asked_of, "chat"), completion_stream.whole, completion_stream.CompletionEvents
)
RESPONSE = Api("resp_", asked_of_response, responses_stream.whole, responses_stream.ResponseEvents)


def paths(service: Service) -> list[Path]:
    errors = (*READ_ERRORS, 404, 409, 429, 503)
    text, chat, response = (body_of(form, service.defaults) for form in ("completion", "chat", "response"))
    return [
        Path(
            "/v1/completions", Completions(service, COMPLETION), "continue a text",
            reply=Completion, event=Completion, body=text, errors=errors,
        ),
        Path(
            "/v1/chat/completions", Completions(service, CHAT), "reply to a conversation",
            reply=ChatCompletion, event=ChatChunk, body=chat, errors=errors,
        ),
        Path(
            "/v1/responses", Completions(service, RESPONSE), "respond to an input",
            reply=ResponseReply, event=ResponseEvent, body=response, errors=errors,
        ),
    ]  # fmt: skip


class Completions:
    """Answers requests to generate, whole or as a stream of server-sent events; a client that leaves ends its
    request."""

    def __init__(self, service: Service, api: Api):
        self.service, self.api = service, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            body = await read_body(Request(scope, receive), self.service.options)
            source = Headers(scope=scope).get(SOURCE)
            read = partial(self._read_request, body, source)
            asked = await asyncio.to_thread(read) if len(body) > LONG else read()
            id = id if asked.resume is None else asked.resume.id
            client = scope.get("client_name", "")
            async with self.service.call(asked.tasks, client, receive=receive) as call:
                scope.update(call=call, response_id=self.api.prefix + id)  # for whoever traces
                require_realm(asked.resume, self.service.realm(call))
                if asked.stream or asked.goes_on:
                    await while_read(receive, self._stream(call, asked, id, send))
                else:
                    outputs = await while_read(receive, self.service.outputs(call))
                    reply = await asyncio.to_thread(self._whole, asked, id, outputs)
                    await reply(scope, receive, send)
        except ClientLeft:
            pass

    def _read_request(self, body: bytes, source: str | None) -> CompletionRequest:
        asked = self.api.asked(object_of(body, "body"), self.service.defaults)
        if asked.tasks[0].model is not None:
            self.service.known(asked.tasks[0].model)
        if source is None:
            return asked
        return replace(asked, tasks=[replace(task, source=source) for task in asked.tasks])

    def _whole(self, asked: CompletionRequest, id: str, outputs: list[RequestOutput]) -> Response:
        body = self.api.whole(self.service.replies, id, asked, outputs)
        return json_response(body, headers={"x-request-id": id})

    def _writer(self, call: ApiCall, asked: CompletionRequest, id: str) -> EventWriter:
        replies = self.service.replies
        if asked.stream:
            return self.api.events(replies, id, asked, call.flows[0].prompt)
        return WholeEvent(lambda: self.api.whole(replies, id, asked, self.service.results(call)))

    def _telling(self, call: ApiCall, asked: CompletionRequest) -> Callable[[list[CompletionOutput]], bytes]:
        """What stands behind the events of a step: its tokens, where the answer may go on elsewhere."""
        if asked.resume is None:
            return lambda outputs: b""
        return TokenReporter(0.0 if asked.stream else SELDOM, lambda: self.service.realm(call))

    async def _stream(self, call: ApiCall, asked: CompletionRequest, id: str, send: Send) -> None:
        events, tell = self._writer(call, asked, id), self._telling(call, asked)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += [(b"x-request-id", id.encode()), (b"x-accel-buffering", b"no")]

        async def write(data: bytes, more: bool = True) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def begin() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if asked.resume is not None and asked.resume.has_begun:
                events.went_before(call.known, asked.resume.events)
            else:
                await write(events.begin())

        begun = False
        async with aclosing(call.stream.pieces()) as pieces:
            try:
                async for outputs in pieces:
                    if not begun:  # what is wrong before the first piece has a status of its own
                        await begin()
                        begun = True
                    await write(events.chunks(outputs) + tell(outputs) if outputs else PING)
            except HttpError as error:
                if not begun:
                    raise
                return await write(events.failed(error.body["error"]), more=False)
        if not begun:  # all of it came from another server
            await begin()
        await write(events.end(**call.usage) + (b"" if asked.resume is None else END), more=False)


def require_realm(resume: Resume | None, own: str) -> None:
    """Raises HttpError where an answer has begun with other weights, or with whatever else decides tokens."""
    if resume is not None and resume.realm not in (None, own):
        told = f"resume.realm is {resume.realm[:MOST_SHOWN]!r}, and answers here are of {own!r}"
        raise HttpError(409, told, "other_realm", "resume")
