"""/v1/completions, /v1/chat/completions and /v1/responses."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...text.openai.completion_request import CompletionRequest, parse_completion, parse_response
from ...text.openai.replies import ID_PREFIXES, Replies
from ...text.openai.reply_types import ChatChunk, ChatCompletion, Completion, ResponseEvent, ResponseReply
from ...text.openai.resume import STREAM_END, ResumeState
from ...text.openai.schemas import make_task_body
from ...text.outputs import GenerationError, RequestOutput
from ..service.api_call import ApiCall
from ..service.body_admission import ClientBody
from ..service.client_connection import ClientLeft, run_while_connected
from ..service.errors import HttpError, convert_error, json_response
from ..service.service import Service
from ..streams import completion_stream, responses_stream
from ..streams.completion_stream import (
    PING,
    TOKEN_COMMENT_SECONDS,
    CompletionEvents,
    TokenReporter,
    WholeEvent,
)
from .body import SOURCE_HEADER
from .client_bodies import admit_body
from .openapi import READ_ERRORS, ApiRoute

EventWriter = CompletionEvents | responses_stream.ResponseEvents | WholeEvent
MAX_REALM_CHARS = 200  # characters of a realm in an error


@dataclass(frozen=True)
class CompletionApi:
    """Functions that read the bodies of a path and write its answers.

    id_prefix: first characters of an answer's id
    parse_body: parses a body, given default sampling parameters
    build_answer: makes a whole answer of the outputs
    make_events: makes the encoder of a stream, given the token ids of each prompt
    """

    id_prefix: str
    parse_body: Callable[[dict[str, Any], Mapping[str, Any]], CompletionRequest]
    build_answer: Callable[[Replies, str, CompletionRequest, list[RequestOutput]], dict[str, Any]]
    make_events: Callable[[Replies, str, CompletionRequest, list[list[int]]], EventWriter]


COMPLETION_API, CHAT_API = (
    CompletionApi(
        ID_PREFIXES[form],
        partial(parse_completion, form),
        completion_stream.build_completion,
        CompletionEvents,
    )
    for form in ("completion", "chat")
)
RESPONSE_API = CompletionApi(
    "resp_", parse_response, responses_stream.build_response, responses_stream.make_response_events
)


def completion_routes(service: Service) -> list[ApiRoute]:
    errors = (*READ_ERRORS, 404, 409)
    text, chat, response = (
        make_task_body(form, service.defaults) for form in ("completion", "chat", "response")
    )
    return [
        ApiRoute(
            "/v1/completions", CompletionRoute(service, COMPLETION_API), "continue a text",
            reply=Completion, event=Completion, body=text, errors=errors,
        ),
        ApiRoute(
            "/v1/chat/completions", CompletionRoute(service, CHAT_API), "reply to a conversation",
            reply=ChatCompletion, event=ChatChunk, body=chat, errors=errors,
        ),
        ApiRoute(
            "/v1/responses", CompletionRoute(service, RESPONSE_API), "respond to an input",
            reply=ResponseReply, event=ResponseEvent, body=response, errors=errors,
        ),
    ]  # fmt: skip


class CompletionRoute:
    """Answers requests to generate, whole or as server-sent events. A client's disconnect ends its
    request."""

    def __init__(self, service: Service, api: CompletionApi):
        self.service, self.api = service, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            async with AsyncExitStack() as stack:
                client_body = await stack.enter_async_context(
                    admit_body(Request(scope, receive), self.service.admission)
                )
                read = partial(self._parse_request, client_body, Headers(scope=scope).get(SOURCE_HEADER))
                request = read() if client_body.is_small else await client_body.run_in_thread(read)
                id = id if request.resume is None else request.resume.id
                call = await stack.enter_async_context(self.service.open_call(request.tasks, client_body))
                await client_body.release()
                scope.update(call=call, response_id=self.api.id_prefix + id)  # for tracing
                require_realm(request.resume, self.service.call_realm(call))
                if request.stream or request.is_resumable:
                    await run_while_connected(receive, self._send_stream(call, request, id, send))
                else:
                    write = partial(self._build_reply, request, id)
                    answer = self.service.answer_call(call, write)
                    reply = await run_while_connected(receive, answer)
                    await reply(scope, receive, send)
        except ClientLeft:
            pass

    def _parse_request(self, client_body: ClientBody, source: str | None) -> CompletionRequest:
        request = self.api.parse_body(client_body.parse_object(), self.service.defaults)
        if request.tasks[0].model is not None:
            self.service.require_model(request.tasks[0].model)
        if source is None:
            return request
        return replace(request, tasks=[replace(task, prefill_address=source) for task in request.tasks])

    def _build_reply(self, request: CompletionRequest, id: str, outputs: list[RequestOutput]) -> Response:
        body = self.api.build_answer(self.service.replies, id, request, outputs)
        return json_response(body, headers={"x-request-id": id})

    def _make_writer(self, call: ApiCall, request: CompletionRequest, id: str) -> EventWriter:
        replies = self.service.replies
        if request.stream:
            return self.api.make_events(
                replies, id, request, [subscription.prompt_ids for subscription in call.subscriptions]
            )
        return WholeEvent(lambda: self.api.build_answer(replies, id, request, call.make_results()))

    async def _send_stream(self, call: ApiCall, request: CompletionRequest, id: str, send: Send) -> None:
        events = self._make_writer(call, request, id)
        seconds = None if request.resume is None else 0.0 if request.stream else TOKEN_COMMENT_SECONDS
        clock = asyncio.get_running_loop().time
        report_tokens = TokenReporter(seconds, lambda: self.service.call_realm(call), clock)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += [(b"x-request-id", id.encode()), (b"x-accel-buffering", b"no")]

        async def write(data: bytes, more: bool = True) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        has_begun = False  # an error before the first piece has a status of its own

        async def begin() -> None:
            nonlocal has_begun
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            has_begun = True
            if request.resume is not None and request.resume.has_begun:
                events.skip_outputs(call.resumed_outputs, request.resume.events)
            else:
                await write(events.encode_start())

        try:
            async with aclosing(call.read_outputs()) as news:
                async for outputs in news:
                    if not has_begun:
                        await begin()
                    await write(events.encode_chunks(outputs) + report_tokens(outputs) if outputs else PING)
            if not has_begun:  # another server has generated all of it
                await begin()
            await write(
                events.encode_end(**call.usage) + (b"" if request.resume is None else STREAM_END), more=False
            )
        except Exception as error:
            if not has_begun:
                raise
            failure = convert_error(error)
            is_final = request.resume is not None and failure.code == GenerationError.CODE  # also elsewhere
            await write(events.encode_error(failure.body["error"]) + STREAM_END * is_final, more=False)
            if failure is not error:
                raise  # for the log


def require_realm(resume: ResumeState | None, realm: str) -> None:
    """Raise HttpError if the answer to resume has another realm than `realm`, this server's: it was begun
    with other weights or settings."""
    if resume is not None and resume.realm not in (None, realm):
        reason = f"resume.realm is {resume.realm[:MAX_REALM_CHARS]!r}, and answers here are of {realm!r}"
        raise HttpError(409, reason, "other_realm", "resume")
