"""/start_profile and /stop_profile: a profile of host and device, for XProf."""

import asyncio
from collections.abc import Callable
from pathlib import Path as Folder

from starlette.requests import Request
from starlette.responses import Response

from ..service.errors import HttpError
from ..service.service import Service
from .openapi import Path


class Profile:
    """Records profiles into a folder of the server's machine."""

    def __init__(self, service: Service, folder: str):
        self._llm, self._folder = service.llm, str(Folder(folder).absolute())
        self.paths = [
            Path(
                "/start_profile", self.start, "record a profile", media=None, errors=[403, 409], changes=True
            ),
            Path(
                "/stop_profile", self.stop, "write the profile", media=None, errors=[403, 409], changes=True
            ),
        ]

    async def start(self, request: Request) -> Response:
        return await self._done(lambda: self._llm.start_profile(self._folder))

    async def stop(self, request: Request) -> Response:
        return await self._done(self._llm.stop_profile)

    async def _done(self, change: Callable[[], object]) -> Response:
        """Run a change in another thread, and answer empty. Raises HttpError if a profile is already, or not,
        recorded."""
        try:
            await asyncio.to_thread(change)
        except RuntimeError as error:
            raise HttpError(409, str(error), "profile") from None
        return Response()
