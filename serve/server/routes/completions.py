"""/v1/completions, /v1/chat/completions and /v1/responses."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...text.openai.errors import object_of
from ...text.openai.replies import PREFIXES, Replies
from ...text.openai.reply_types import ChatChunk, ChatCompletion, Completion, ResponseEvent, ResponseReply
from ...text.openai.resume import END, ResumeState
from ...text.openai.schemas import body_of
from ...text.outputs import RequestOutput
from ..service.errors import HttpError, json_response
from ..service.service import ApiCall, Service
from ..service.streams import ClientLeft, while_read
from ..streams import completion_stream, responses_stream
from ..streams.completion_request import CompletionRequest, parse_completion, parse_response
from ..streams.completion_stream import PING, SELDOM, CompletionEvents, TokenReporter, WholeEvent
from .body import SOURCE, read_body
from .openapi import READ_ERRORS, Path

LONG = 1 << 14  # bytes; longer bodies are read in another thread
EventWriter = CompletionEvents | responses_stream.ResponseEvents | WholeEvent
MOST_SHOWN = 200  # characters of a realm in an error


@dataclass(frozen=True)
class CompletionApi:
    """Reads the bodies of a path (`parse`, given default sampling parameters), and writes its answers:
    `whole`, or by the writer of a stream, `events`. `prefix` is that of their ids."""

    prefix: str
    parse: Callable[[dict[str, Any], Mapping[str, Any]], CompletionRequest]
    whole: Callable[[Replies, str, CompletionRequest, list[RequestOutput]], dict[str, Any]]
    events: Callable[[Replies, str, CompletionRequest, list[int]], EventWriter]


COMPLETION, CHAT = (
    CompletionApi(PREFIXES[form], partial(parse_completion, form), completion_stream.whole, CompletionEvents)
    for form in ("completion", "chat")
)
RESPONSE = CompletionApi("resp_", parse_response, responses_stream.whole, responses_stream.ResponseEvents)


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
    """Answers requests to generate, whole or as server-sent events. A client that disconnects ends its
    request."""

    def __init__(self, service: Service, api: CompletionApi):
        self.service, self.api = service, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            body = await read_body(Request(scope, receive), self.service.options)
            source = Headers(scope=scope).get(SOURCE)
            read = partial(self._read_request, body, source)
            request = await asyncio.to_thread(read) if len(body) > LONG else read()
            id = id if request.resume is None else request.resume.id
            client = scope.get("client_name", "")
            async with self.service.call(request.tasks, client, receive=receive) as call:
                scope.update(call=call, response_id=self.api.prefix + id)  # for tracing
                require_realm(request.resume, self.service.realm(call))
                if request.stream or request.is_resumable:
                    await while_read(receive, self._stream(call, request, id, send))
                else:
                    outputs = await while_read(receive, self.service.outputs(call))
                    reply = await asyncio.to_thread(self._whole, request, id, outputs)
                    await reply(scope, receive, send)
        except ClientLeft:
            pass

    def _read_request(self, body: bytes, source: str | None) -> CompletionRequest:
        request = self.api.parse(object_of(body, "body"), self.service.defaults)
        if request.tasks[0].model is not None:
            self.service.require_model(request.tasks[0].model)
        if source is None:
            return request
        return replace(request, tasks=[replace(task, source=source) for task in request.tasks])

    def _whole(self, request: CompletionRequest, id: str, outputs: list[RequestOutput]) -> Response:
        body = self.api.whole(self.service.replies, id, request, outputs)
        return json_response(body, headers={"x-request-id": id})

    def _writer(self, call: ApiCall, request: CompletionRequest, id: str) -> EventWriter:
        replies = self.service.replies
        if request.stream:
            return self.api.events(replies, id, request, call.flows[0].prompt)
        return WholeEvent(lambda: self.api.whole(replies, id, request, self.service.results(call)))

    async def _stream(self, call: ApiCall, request: CompletionRequest, id: str, send: Send) -> None:
        events = self._writer(call, request, id)
        seconds = None if request.resume is None else 0.0 if request.stream else SELDOM
        clock = asyncio.get_running_loop().time
        tokens = TokenReporter(seconds, lambda: self.service.realm(call), clock)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += [(b"x-request-id", id.encode()), (b"x-accel-buffering", b"no")]

        async def write(data: bytes, more: bool = True) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def begin() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if request.resume is not None and request.resume.has_begun:
                events.skip(call.resumed, request.resume.events)
            else:
                await write(events.begin())

        begun = False
        async with aclosing(call.stream.pieces()) as pieces:
            try:
                async for outputs in pieces:
                    if not begun:  # an error before the first piece has a status of its own
                        await begin()
                        begun = True
                    await write(events.chunks(outputs) + tokens(outputs) if outputs else PING)
            except HttpError as error:
                if not begun:
                    raise
                return await write(events.failed(error.body["error"]), more=False)
        if not begun:  # another server has generated all of it
            await begin()
        await write(events.end(**call.usage) + (b"" if request.resume is None else END), more=False)


def require_realm(resume: ResumeState | None, own: str) -> None:
    """Raise HttpError if an answer has begun with other weights, or with other settings that decide
    tokens."""
    if resume is not None and resume.realm not in (None, own):
        reason = f"resume.realm is {resume.realm[:MOST_SHOWN]!r}, and answers here are of {own!r}"
        raise HttpError(409, reason, "other_realm", "resume")
