"""/v1/embeddings."""

import uuid
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...llm.subscription import Subscription
from ...llm.tasks.embedding import embedding_of
from ...text.openai.body_fields import CacheFields, EmbeddingFields
from ...text.openai.embeddings import EmbeddingInputs, embedding_reply, parse_embedding_body
from ...text.openai.reply_types import EmbeddingReply
from ...text.openai.schemas import Body, ignored_field_schemas
from ...text.openai.tasks import Task
from ..service.body_admission import ClientBody
from ..service.client_connection import ClientLeft, run_while_connected
from ..service.errors import json_response
from ..service.service import Service
from .client_bodies import admit_body
from .openapi import READ_ERRORS, ApiRoute

MAX_INPUTS_AT_ONCE = 64  # inputs of a request that are in the engine at a time


class EmbeddingRoute:
    """Answers requests for embeddings. A client's disconnect ends its request."""

    def __init__(self, service: Service):
        self.service = service
        records, example = (EmbeddingFields, CacheFields), {"input": "sort a list"}
        body = Body("EmbeddingBody", records, example, ignored_field_schemas(), is_closed=True)
        errors = (*READ_ERRORS, 404)
        self.routes = [
            ApiRoute("/v1/embeddings", self, "embed texts", reply=EmbeddingReply, body=body, errors=errors)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id = uuid.uuid4().hex
        try:
            async with admit_body(Request(scope, receive), self.service.admission) as client_body:
                inputs = await client_body.run_in_thread(
                    lambda: parse_embedding_body(client_body.parse_object())
                )
                await client_body.release()
                if inputs.tasks[0].model is not None:
                    self.service.require_model(inputs.tasks[0].model)
                with self.service.count_call():
                    subscriptions = await self._run_embeddings(inputs.tasks, client_body, scope, receive)
                    scope["response_id"] = id  # for tracing
                    write = partial(self._build_reply, inputs, subscriptions, id)
                    answer = await self.service.admission.answer_pool.run(
                        client_body.client, len(subscriptions), write
                    )
            await answer(scope, receive, send)
        except ClientLeft:
            pass

    async def _run_embeddings(
        self, tasks: list[Task], client_body: ClientBody, scope: Scope, receive: Receive
    ) -> list[Subscription]:
        """Run all inputs to their end, `MAX_INPUTS_AT_ONCE` at a time, and return their subscriptions. Only
        the first ones have to be admitted."""
        subscriptions: list[Subscription] = []
        size = min(MAX_INPUTS_AT_ONCE, self.service.options.max_queued)
        for i in range(0, len(tasks), size):
            if i > 0:
                client_body.renew_deadline()
            async with self.service.open_call(tasks[i : i + size], client_body, is_admitted=i > 0) as call:
                await run_while_connected(receive, call.wait_end())
                subscriptions += call.subscriptions
                scope["call"] = replace(call, tasks=tasks, subscriptions=subscriptions)
        return subscriptions

    def _build_reply(self, inputs: EmbeddingInputs, subscriptions: list[Subscription], id: str) -> Response:
        model = inputs.tasks[0].model or self.service.names[0]
        tokens = sum(len(subscription.prompt_ids) for subscription in subscriptions)
        body = embedding_reply(model, inputs, list(map(embedding_of, subscriptions)), tokens)
        return json_response(body, headers={"x-request-id": id})
