"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

import asyncio
from dataclasses import dataclass, field, fields

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....fields import knob
from ....lora.request import LoRARequest
from ....refusals import shown
from ...text.openai.errors import RequestError, flag, object_of
from ...text.openai.schemas import Body
from ...text.openai.tasks import refuse_unknown
from ..service.errors import HttpError
from ..service.service import Service
from .body import read_body
from .openapi import READ_ERRORS, Path

MOST_CHARACTERS = 1024  # of a name or a folder's path


@dataclass(frozen=True)
class LoadFields:
    """An adapter to serve."""

    lora_name: str = field(metadata={"help": "the name that requests give as their model"})
    lora_path: str = field(metadata={"help": "a folder of the server's machine, as PEFT writes it"})
    load_inplace: bool | None = knob(False, "take the place of the one that has the name")


@dataclass(frozen=True)
class UnloadFields:
    """An adapter to remove."""

    lora_name: str = field(metadata={"help": "its name"})


class Adapters:
    """Loads and unloads adapters while requests run; these keep the adapter that they began with."""

    def __init__(self, service: Service):
        self.service = service
        example = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        load = Body("LoadAdapterBody", (LoadFields,), example, closed=True)
        unload = Body("UnloadAdapterBody", (UnloadFields,), {"lora_name": "sql"}, closed=True)
        self.paths = [
            Path(
                "/v1/load_lora_adapter", self.load, "serve an adapter", body=load, media="text/plain",
                errors=READ_ERRORS, changes=True,
            ),
            Path(
                "/v1/unload_lora_adapter", self.unload, "serve it no longer", body=unload,
                media="text/plain", errors=(*READ_ERRORS, 404), changes=True,
            ),
        ]  # fmt: skip

    async def load(self, request: Request) -> Response:
        body = await self._body(request, LoadFields)
        name, path = text(body, "lora_name"), text(body, "lora_path")
        again = flag(body, "load_inplace", default=False)
        registry = self.service.require_adapters()
        if name in self.service.names:
            raise RequestError("invalid_request", f"{name!r} is the model's own name", "lora_name")
        if name in self.service.adapters and not again:
            reason = f"the adapter {name!r} has been loaded already: set load_inplace to load it again"
            raise RequestError("invalid_request", reason, "lora_name")
        try:
            await asyncio.to_thread(lambda: registry.load(LoRARequest(name, registry.next_id(), path)))
        except ValueError as error:
            raise RequestError("invalid_request", str(error), "lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(self, request: Request) -> Response:
        name = text(await self._body(request, UnloadFields), "lora_name")
        try:
            self.service.require_adapters().unload(name)
        except ValueError as error:
            raise HttpError(404, str(error), "adapter_not_found", "lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")

    async def _body(self, request: Request, kind: type) -> dict[str, object]:
        body = object_of(await read_body(request, self.service.options), "body")
        given = {name: value for name, value in body.items() if value is not None}
        refuse_unknown(given, frozenset(f.name for f in fields(kind)))
        return given


def text(body: dict[str, object], name: str) -> str:
    found = body.get(name)
    if not isinstance(found, str) or not 0 < len(found) <= MOST_CHARACTERS:
        allowed = f"a string of 1 to {MOST_CHARACTERS} characters"
        raise RequestError("invalid_request", f"{name}={shown(found)} is not allowed: {allowed}", name)
    return found
