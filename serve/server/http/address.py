"""Where a process listens, and the two steps of its end: what servers and routers share. Nothing here imports
jax."""

import os
import signal
import socket
import ssl
from collections.abc import Callable
from ipaddress import ip_address
from types import FrameType

import uvicorn

from ...host.streams import tell
from ...options.server import ServerOptions


def reserved(options: ServerOptions) -> socket.socket:
    """The address, which nobody else has from here on, before a model is read. Raises OSError where somebody
    has it."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        bind_alone(own, (options.host, options.port))
    except OSError as error:
        own.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return own


def bind_alone(own: socket.socket, address: tuple[str, int]) -> None:
    """Bind to an address so that nobody else can, though nobody listens there yet. Raises OSError."""
    try:
        own.bind(address)
    except OSError:  # an earlier server's connections may linger there
        reuse(own, True)
        own.bind(address)
        reuse(own, False)


def reuse(own: socket.socket, allowed: bool) -> None:
    """Whether the address may be taken while nobody listens there: of two sockets, both have to allow it."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def check_certificates(options: ServerOptions) -> None:
    """Raises ValueError, before a model is read, for certificates that cannot be used."""
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            files = " with ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
            raise ValueError(f"ssl_certfile {files} is not allowed: {error}") from None


class Server(uvicorn.Server):
    """Ends in two steps: at a first signal it takes no more requests, and ends when those under way are done;
    a second one ends the process."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], object], place: str):
        super().__init__(config)
        self._drain, self._place, self._signals = drain, place, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        tell(f"duetto: serving {self._place}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        tell(f"duetto: {signal.Signals(sig).name}: no more requests are taken; a second signal ends at once")
        self._drain()


def url(options: ServerOptions, own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_of_this_machine(own: socket.socket) -> bool:
    """Whether nobody elsewhere reaches its address."""
    return ip_address(own.getsockname()[0].partition("%")[0]).is_loopback
