"""/v1/completions and /v1/chat/completions."""

import asyncio
import uuid
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..openai.reading import object_of
from ..openai.tasks import Form
from ..outputs import RequestOutput
from .answers import PING, Events, event, whole
from .asked import Asked, asked_of
from .body import read_body
from .errors import HttpError, json_response
from .service import Call, Service
from .streams import ClientLeft, while_read

LONG = 1 << 14  # bytes of a body that is read in another thread


class Completions:
    """Answers requests of one form, whole or as a stream of server-sent events; a client that leaves ends its
    request."""

    def __init__(self, service: Service, form: Form):
        self.service = service
        self.form: Form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            body = await read_body(Request(scope, receive), self.service.options)
            asked = await asyncio.to_thread(self._asked, body) if len(body) > LONG else self._asked(body)
            async with self.service.call(asked.tasks, scope.get("client_name", "")) as call:
                if asked.stream:
                    await while_read(receive, self._stream(call, asked, id, send))
                else:
                    outputs = await while_read(receive, self.service.outputs(call))
                    reply = await self._whole(asked, id, outputs)
                    await reply(scope, receive, send)
        except ClientLeft:
            pass

    def _asked(self, body: bytes) -> Asked:
        asked = asked_of(self.form, object_of(body, "body"), self.service.defaults)
        if asked.tasks[0].model is not None:
            self.service.known(asked.tasks[0].model)
        return asked

    async def _whole(self, asked: Asked, id: str, outputs: list[RequestOutput]) -> Response:
        body = await asyncio.to_thread(whole, self.service.replies, id, asked, outputs)
        return json_response(body, headers={"x-request-id": id})

    async def _stream(self, call: Call, asked: Asked, id: str, send: Send) -> None:
        events = Events(self.service.replies, id, asked)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers += [(b"x-request-id", id.encode()), (b"x-accel-buffering", b"no")]

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        begun = False
        async with aclosing(call.stream.pieces()) as pieces:
            try:
                async for outputs in pieces:
                    if not begun:  # what is wrong before the first piece has a status of its own
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        await write(events.begin())
                        begun = True
                    await write(events.chunks(outputs) if outputs else PING)
            except HttpError as error:
                if not begun:
                    raise
                return await write(event(error.body), more=False)
        await write(events.end(**call.usage), more=False)
