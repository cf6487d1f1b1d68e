"""/start_profile and /stop_profile: a profile of host and device, for XProf."""

import asyncio
from collections.abc import Callable
from functools import partial
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
        changes = {
            "/start_profile": ("record a profile", lambda: self._llm.start_profile(self._folder)),
            "/stop_profile": ("write the profile", self._llm.stop_profile),
        }
        self.paths = [
            Path(path, partial(self._change, do), about, media=None, errors=[403, 409], changes=True)
            for path, (about, do) in changes.items()
        ]

    async def _change(self, change: Callable[[], object], request: Request) -> Response:
        """Run a change in another thread, and answer empty. Raises HttpError if a profile is already, or not,
        recorded."""
        try:
            await asyncio.to_thread(change)
        except RuntimeError as error:
            raise HttpError(409, str(error), "profile") from None
        return Response()
