"""/v1/embeddings."""

import asyncio
import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...llm.driver import StreamHandle
from ...text.openai.bodies import EmbeddingFields
from ...text.openai.embeddings import EmbeddingInputs, inputs_of, reply
from ...text.openai.errors import object_of
from ...text.openai.reply_types import EmbeddingReply
from ...text.openai.schemas import Body, without_effect
from ...text.openai.tasks import Task
from ..service.errors import json_response
from ..service.service import Service
from ..service.streams import ClientLeft, while_read
from .body import read_body
from .openapi import READ_ERRORS, Path

AT_ONCE = 64  # inputs of a request that are in the engine at a time


class Embeddings:
    """Answers requests for embeddings. A client that disconnects ends its request."""

    def __init__(self, service: Service):
        self.service = service
        body = Body(
            "EmbeddingBody", (EmbeddingFields,), {"input": "sort a list"}, without_effect(), closed=True
        )
        errors = (*READ_ERRORS, 404, 429, 503)
        self.paths = [
            Path("/v1/embeddings", self, "embed texts", reply=EmbeddingReply, body=body, errors=errors)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            body = await read_body(Request(scope, receive), self.service.options)
            inputs = await asyncio.to_thread(lambda: inputs_of(object_of(body, "body")))
            if inputs.tasks[0].model is not None:
                self.service.require_model(inputs.tasks[0].model)
            with self.service.under_way():
                flows = await self._embedded(inputs.tasks, scope, receive)
                scope["response_id"] = id  # for tracing
                answer = await asyncio.to_thread(self._answer, inputs, flows, id)
            await answer(scope, receive, send)
        except ClientLeft:
            pass

    async def _embedded(self, tasks: list[Task], scope: Scope, receive: Receive) -> list[StreamHandle]:
        """Return the finished flows of all inputs; the request waits in the queue once."""
        flows: list[StreamHandle] = []
        size, client = min(AT_ONCE, self.service.options.max_queued), scope.get("client_name", "")
        for i in range(0, len(tasks), size):
            async with self.service.call(tasks[i : i + size], client, is_admitted=i > 0) as call:
                await while_read(receive, call.stream.ended())
                flows += call.flows
                scope["call"] = replace(call, tasks=tasks, flows=flows)
        return flows

    def _answer(self, inputs: EmbeddingInputs, flows: list[StreamHandle], id: str) -> Response:
        model = inputs.tasks[0].model or self.service.names[0]
        tokens = sum(len(flow.prompt) for flow in flows)
        body = reply(model, inputs, [flow.embedding for flow in flows], tokens)
        return json_response(body, headers={"x-request-id": id})
