"""The address and the certificates of a server or a router. Nothing here imports jax."""

import socket
import ssl
from ipaddress import ip_address

from ...options.server import ServerOptions


def reserved(options: ServerOptions) -> socket.socket:
    """Bind the address before a model is read, so that no other process takes it. Raises OSError if it is in
    use."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        bind_alone(own, (options.host, options.port))
    except OSError as error:
        own.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return own


def bind_alone(own: socket.socket, address: tuple[str, int]) -> None:
    """Bind to an address so that no other socket can, even before this one listens. Raises OSError."""
    try:
        own.bind(address)
    except OSError:  # an earlier server's connections may linger there
        reuse(own, True)
        own.bind(address)
        reuse(own, False)


def reuse(own: socket.socket, allowed: bool) -> None:
    """Set whether the address may be bound again while no socket listens: of two sockets, both must allow
    it."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def check_certificates(options: ServerOptions) -> None:
    """Raise ValueError, before a model is read, for certificates that cannot be used."""
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            files = " with ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
            raise ValueError(f"ssl_certfile {files} is not allowed: {error}") from None


def url(options: ServerOptions, own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_of_this_machine(own: socket.socket) -> bool:
    """Return whether only processes of this machine can connect to the socket."""
    return ip_address(own.getsockname()[0].partition("%")[0]).is_loopback
