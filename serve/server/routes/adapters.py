"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

import asyncio
from dataclasses import dataclass, field, fields

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....lora.request import LoRARequest
from ....option_fields import knob
from ....refusals import quote
from ...text.openai.errors import RequestError, is_flag_set
from ...text.openai.schemas import Body
from ...text.openai.tasks import refuse_unknown_fields
from ..service.errors import HttpError
from ..service.service import Service
from .client_bodies import read_object
from .openapi import READ_ERRORS, ApiRoute

MAX_CHARACTERS = 1024  # of a name or a folder's path


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


class AdapterRoutes:
    """Loads and unloads adapters while requests run. A running request keeps the adapter that it began
    with."""

    def __init__(self, service: Service):
        self.service = service
        example = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        load = Body("LoadAdapterBody", (LoadFields,), example, is_closed=True)
        unload = Body("UnloadAdapterBody", (UnloadFields,), {"lora_name": "sql"}, is_closed=True)
        self.routes = [
            ApiRoute(
                "/v1/load_lora_adapter", self.load_adapter, "serve an adapter", body=load,
                media_type="text/plain", errors=READ_ERRORS, is_post=True,
            ),
            ApiRoute(
                "/v1/unload_lora_adapter", self.unload_adapter, "serve it no longer", body=unload,
                media_type="text/plain", errors=(*READ_ERRORS, 404), is_post=True,
            ),
        ]  # fmt: skip

    async def load_adapter(self, request: Request) -> Response:
        body = await self._read_fields(request, LoadFields)
        name, path = require_text(body, "lora_name"), require_text(body, "lora_path")
        is_reload = is_flag_set(body, "load_inplace", default=False)
        registry = self.service.require_adapter_registry()
        if name in self.service.names:
            raise RequestError("invalid_request", f"{name!r} is the model's own name", "lora_name")
        if name in self.service.adapters and not is_reload:
            reason = f"the adapter {name!r} has been loaded already: set load_inplace to load it again"
            raise RequestError("invalid_request", reason, "lora_name")
        try:
            await asyncio.to_thread(lambda: registry.load(LoRARequest(name, registry.next_id(), path)))
        except ValueError as error:
            raise RequestError("invalid_request", str(error), "lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name = require_text(await self._read_fields(request, UnloadFields), "lora_name")
        try:
            self.service.require_adapter_registry().unload(name)
        except ValueError as error:
            raise HttpError(404, str(error), "adapter_not_found", "lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")

    async def _read_fields(self, request: Request, kind: type) -> dict[str, object]:
        body = await read_object(request, self.service.admission)
        values = {name: value for name, value in body.items() if value is not None}
        refuse_unknown_fields(values, frozenset(f.name for f in fields(kind)))
        return values


def require_text(body: dict[str, object], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARACTERS:
        allowed = f"a string of 1 to {MAX_CHARACTERS} characters"
        raise RequestError("invalid_request", f"{name}={quote(value)} is not allowed: {allowed}", name)
    return value
