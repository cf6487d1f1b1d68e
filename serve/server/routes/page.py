"""/openapi.json, and the page on which its paths can be tried."""

import base64
import pathlib
import re
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .openapi import Path, document

PAGE = pathlib.Path(__file__).with_name("docs.html")


class ApiPage:
    """Says what the paths of a server are, its own included, for programs and for people."""

    def __init__(self, others: Sequence[Path], has_keys: bool):
        self.paths = [
            Path("/openapi.json", self.openapi, "this document", reply=dict[str, Any], is_open=True),
            Path("/docs", self.docs, "a page to try all of this", media="text/html", is_open=True),
        ]
        self._document = msgspec.json.encode(document([*others, *self.paths], version("duetto"), has_keys))
        self._page = PAGE.read_bytes()
        self._headers = {
            "content-security-policy": policy(self._page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers, media_type="text/html")


def policy(page: bytes) -> str:
    """A browser runs the page's own script and style, and asks its own server, and nothing else."""
    script, style = (f"'sha256-{digest(page, name)}'" for name in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def digest(page: bytes, name: bytes) -> str:
    """Of what an element holds, which the page has one of."""
    (held,) = re.findall(b"<%b>(.*?)</%b>" % (name, name), page, re.DOTALL)
    return base64.b64encode(sha256(held).digest()).decode()
