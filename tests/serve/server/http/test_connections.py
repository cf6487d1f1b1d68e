"""What a server makes of connections and addresses."""

import json
import signal
import socket
import time

import pytest

from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.lifecycle import bind_socket, set_address_reuse

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first-key\r\n"
BODY = json.dumps({"prompt": "def", "max_tokens": 2}).encode()
OFFERS = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
]


@pytest.mark.parametrize("offer", OFFERS)
def test_offers_of_other_protocols_are_passed_over(server, offer):
    """With their bodies, of a length or in chunks, and requests behind them."""
    sized = HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    head = HEAD + offer + b"connection: close, upgrade\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    for pieces in ([sized + sized, chunked], [sized[:-9], sized[-9:], sized + chunked[:-20], chunked[-20:]]):
        with server.socket() as own:
            for piece in pieces:
                own.sendall(piece)
                time.sleep(0.02)
            said = b"".join(iter(lambda: own.recv(1 << 16), b""))
        assert said.count(b"HTTP/1.1 200 OK") == said.count(b'"completion_tokens":2') == 3, said


def test_many_pipelined_heads_are_answered(server):
    """Are not a long one."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    with server.socket() as own:
        own.sendall((head + OFFERS[1] + b"\r\n") * 2000 + head + b"connection: close\r\n\r\n")
        said = b"".join(iter(lambda: own.recv(1 << 16), b""))
    assert said.count(b"HTTP/1.1 200 OK") == 2001


def test_clients_that_still_send_at_shutdown_get_errors(starting):
    """And does not delay it."""
    server = starting()
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with server.socket() as own:
        own.sendall(health + HEAD + b"content-length: 99\r\n\r\n{")
        assert b"200 OK" in own.recv(1 << 16)  # what came with it is read, too
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        said = b"".join(iter(lambda: own.recv(1 << 16), b""))
        took = time.monotonic() - began
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"]["code"] == "unavailable"
    assert server.ended() == 0 and took < ServerOptions().receive_timeout / 2
    assert not any("rror" in line for line in server.said), server.said


def test_a_bound_address_is_refused_before_listening():
    """And the next one's as soon as that has ended, though its connections linger."""
    options = ServerOptions(port=port())
    for _ in range(2):
        with bind_socket(options) as own:
            with pytest.raises(OSError, match=f"127.0.0.1 port {options.port}: Address already in use"):
                bind_socket(options)
            set_address_reuse(own, True)  # as a server does before it listens
            own.listen()
            with socket.create_connection(own.getsockname()) as client:
                own.accept()[0].close()  # the server's end closes first, and lingers
                assert client.recv(1) == b""


def port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


ENDLESS = [
    b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 20000,  # a trailer
    b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 100000,  # an extension of a chunk
]


@pytest.mark.parametrize("sent", ENDLESS)
@pytest.mark.parametrize("line", [b"GET /health", b"POST /tokenize"])
def test_chunk_extensions_and_trailers_are_bounded(server, line, sent):
    """Also on a path that reads no body, and asks for no key."""
    with server.socket() as own:
        try:
            own.sendall(line + b" HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first-key\r\n" + sent)
            while own.recv(1 << 16):
                pass
        except ConnectionError:
            pass  # closed with some of it unread


def test_data_that_is_no_request_closes_the_connection(server):
    """The server's timeout is 2 s."""
    with server.socket() as own:
        own.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in own.recv(1 << 16)
        own.sendall(b"\r\n")
        assert own.recv(1 << 16) == b""
