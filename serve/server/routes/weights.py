"""/update_weights, and around it /pause, /resume and /is_paused, as vLLM has these."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from ....option_fields import knob
from ...text.openai.errors import RequestError, require_field
from ...text.openai.schemas import Body
from ..service.errors import HttpError, json_response
from ..service.service import Service
from .client_bodies import read_object
from .openapi import READ_ERRORS, ApiRoute

MODES, TRUTH_VALUES = ("abort", "wait", "keep"), ("true", "false")


@dataclass(frozen=True)
class UpdateFields:
    """A folder of weights, and how requests under way are treated."""

    path: str = field(metadata={"help": "a folder of the same model, in the server's folder for weights"})
    mode: Literal["abort", "wait", "keep"] | None = knob(
        "keep", "requests under way end at once, run to their end before, or go on with the new weights"
    )


class Paused(TypedDict):
    status: Literal["paused", "resumed"]


class IsPaused(TypedDict):
    is_paused: bool


class Updated(TypedDict):
    """The number of updates so far."""

    version: int


class WeightRoutes:
    """Replaces the weights from folders on the server's machine, one update at a time."""

    def __init__(self, service: Service, folder: str):
        self.service, self._llm, self._folder = service, service.llm, Path(folder).resolve()
        self._lock = asyncio.Lock()
        body = Body("UpdateBody", (UpdateFields,), {"path": "step-100", "mode": "keep"}, is_closed=True)
        query = {"mode": MODES, "clear_cache": TRUTH_VALUES}
        self.routes = [
            ApiRoute(
                "/pause", self.pause, "take no more steps: mode abort (the default), wait or keep",
                reply=Paused, errors=[400, 403, 409], is_post=True, query=query,
            ),
            ApiRoute("/resume", self.resume, "go on", reply=Paused, errors=[403, 409], is_post=True),
            ApiRoute("/is_paused", self.answer_is_paused, "whether steps are taken", reply=IsPaused),
            ApiRoute(
                "/update_weights", self.update_weights, "serve the weights of a folder",
                reply=Updated, body=body, errors=(*READ_ERRORS, 409),
            ),
        ]  # fmt: skip

    async def pause(self, request: Request) -> Response:
        pairs = request.query_params.multi_items()
        repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        require_field(not repeated, "query", ", ".join(repeated), "each name once")
        query: dict[str, Any] = {"mode": "abort", "clear_cache": "true"} | dict(pairs)
        others = sorted(query.keys() - {"mode", "clear_cache"})
        require_field(not others, "query", ", ".join(others), "mode and clear_cache")
        for name, allowed in {"mode": MODES, "clear_cache": TRUTH_VALUES}.items():
            require_field(query[name] in allowed, name, query[name], ", ".join(allowed))
        pause = partial(self._llm.pause_generation, query["mode"], query["clear_cache"] == "true")
        await self._run_change(pause)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._run_change(self._llm.resume_generation)
        return json_response({"status": "resumed"})

    async def answer_is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": self._llm.is_sleeping()})

    async def update_weights(self, request: Request) -> Response:
        body = await read_object(request, self.service.admission)
        others = sorted(body.keys() - {"path", "mode"})
        require_field(not others, "body", ", ".join(others), "path and mode")
        mode = body.get("mode") or "keep"
        require_field(mode in MODES, "mode", mode, ", ".join(MODES))
        load = partial(self._llm.load_params, self._resolve_folder(body.get("path")), mode)
        return json_response({"version": await self._run_change(load)})

    def _resolve_folder(self, path: Any) -> Path:
        """Return the folder that a client's `path` names. Raises RequestError unless it is a folder inside
        the server's folder for weights."""
        require_field(isinstance(path, str) and bool(path), "path", path, "a folder's name")
        try:
            resolved = (self._folder / path).resolve()
            is_inside = resolved.is_relative_to(self._folder) and resolved.is_dir()
        except (OSError, ValueError):  # no file has such a name
            resolved, is_inside = self._folder, False
        require_field(is_inside, "path", path, "a folder in the server's folder for weights")
        return resolved

    async def _run_change(self, change: Callable[[], Any]) -> Any:
        """Run a change of the engine, one at a time, and return its result. Raises RequestError or HttpError
        if it fails."""
        try:
            async with self._lock:
                return await self.service.change_engine(change)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError("invalid_request", str(error)) from None
        except RuntimeError as error:
            raise HttpError(409, str(error), "weights") from None
