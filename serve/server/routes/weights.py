"""/update_weights, and around it /pause, /resume and /is_paused, as vLLM has these."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as Folder
from typing import Any, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from ....fields import knob
from ...text.openai.errors import RequestError, object_of, require
from ...text.openai.schemas import Body
from ..service.errors import HttpError, json_response
from ..service.service import Service
from .body import read_body
from .openapi import READ_ERRORS, Path

MODES, TRUTH = ("abort", "wait", "keep"), ("true", "false")


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


class Weights:
    """Replaces the weights by those of folders on the server's machine, one update at a time."""

    def __init__(self, service: Service, folder: str):
        self.service, self._llm, self._folder = service, service.llm, Folder(folder).resolve()
        self._one = asyncio.Lock()
        body = Body("UpdateBody", (UpdateFields,), {"path": "step-100", "mode": "keep"}, closed=True)
        query = {"mode": MODES, "clear_cache": TRUTH}
        self.paths = [
            Path(
                "/pause", self.pause, "take no more steps: mode abort (the default), wait or keep",
                reply=Paused, errors=[400, 403, 409], changes=True, query=query,
            ),
            Path("/resume", self.resume, "go on", reply=Paused, errors=[403, 409], changes=True),
            Path("/is_paused", self.is_paused, "whether steps are taken", reply=IsPaused),
            Path(
                "/update_weights", self.update, "serve the weights of a folder",
                reply=Updated, body=body, errors=(*READ_ERRORS, 409),
            ),
        ]  # fmt: skip

    async def pause(self, request: Request) -> Response:
        given = request.query_params.multi_items()
        repeated = [name for name, count in Counter(name for name, _ in given).items() if count > 1]
        require(not repeated, "query", ", ".join(repeated), "each name once")
        query: dict[str, Any] = {"mode": "abort", "clear_cache": "true"} | dict(given)
        others = sorted(query.keys() - {"mode", "clear_cache"})
        require(not others, "query", ", ".join(others), "mode and clear_cache")
        for name, allowed in {"mode": MODES, "clear_cache": TRUTH}.items():
            require(query[name] in allowed, name, query[name], ", ".join(allowed))
        pause = partial(self._llm.pause_generation, query["mode"], query["clear_cache"] == "true")
        await self._done(pause)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._done(self._llm.resume_generation)
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": self._llm.is_sleeping()})

    async def update(self, request: Request) -> Response:
        body = object_of(await read_body(request, self.service.options), "body")
        others = sorted(body.keys() - {"path", "mode"})
        require(not others, "body", ", ".join(others), "path and mode")
        mode = body.get("mode") or "keep"
        require(mode in MODES, "mode", mode, ", ".join(MODES))
        load = partial(self._llm.load_params, self._place(body.get("path")), mode)
        return json_response({"version": await self._done(load)})

    def _place(self, path: Any) -> Folder:
        """Return the folder that a client names. Raises RequestError unless it is in the server's folder for
        weights."""
        require(isinstance(path, str) and bool(path), "path", path, "a folder's name")
        try:
            found = (self._folder / path).resolve()
            inside = found.is_relative_to(self._folder) and found.is_dir()
        except (OSError, ValueError):  # no file has such a name
            found, inside = self._folder, False
        require(inside, "path", path, "a folder in the server's folder for weights")
        return found

    async def _done(self, change: Callable[[], Any]) -> Any:
        """Run a change after those before it, and return its result. Raises RequestError or HttpError if it
        fails."""
        try:
            async with self._one:
                return await self.service.change(change)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError("invalid_request", str(error)) from None
        except RuntimeError as error:
            raise HttpError(409, str(error), "weights") from None
