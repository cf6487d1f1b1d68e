"""/start_profile and /stop_profile: a profile of host and device, for XProf."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ..service.errors import HttpError
from ..service.service import Service
from .openapi import ApiRoute


class ProfileRoutes:
    """Records profiles into a folder of the server's machine."""

    def __init__(self, service: Service, folder: str):
        self._llm, self._folder = service.llm, str(Path(folder).absolute())
        changes = {
            "/start_profile": ("record a profile", lambda: self._llm.start_profile(self._folder)),
            "/stop_profile": ("write the profile", self._llm.stop_profile),
        }
        self.routes = [
            ApiRoute(
                path,
                partial(self._switch_profiler, do),
                about,
                media_type=None,
                errors=[403, 409],
                is_post=True,
            )
            for path, (about, do) in changes.items()
        ]

    async def _switch_profiler(self, change: Callable[[], object], request: Request) -> Response:
        """Start or stop the profiler in another thread, and answer without a body. Raises HttpError if it
        already runs, or does not run."""
        try:
            await asyncio.to_thread(change)
        except RuntimeError as error:
            raise HttpError(409, str(error), "profile") from None
        return Response()
