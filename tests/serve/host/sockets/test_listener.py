"""A port: strangers are few, and do not stay; whatever the system refuses for a while, it goes on."""

import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from fakes.handover import soon

from duetto.serve.host.sockets import listener as ports
from duetto.serve.host.sockets import secret as secrets
from duetto.serve.host.sockets.listener import AuthenticatedListener
from duetto.serve.host.sockets.secret import Secret
from duetto.serve.options.engine import EngineOptions

SOON, KEY = 60.0, Secret("test", b"k" * 32)


@pytest.fixture
def opened():
    """Makes ports whose guests send a word, and get it back."""
    made: list[AuthenticatedListener] = []

    def greet(connection: socket.socket) -> tuple[socket.socket, bytes]:
        return connection, connection.recv(100)

    def host(guest: tuple[socket.socket, bytes]) -> None:
        connection, word = guest
        with connection:
            connection.sendall(word)

    def port(secret: Secret = KEY, address: str = "127.0.0.1") -> AuthenticatedListener:
        made.append(AuthenticatedListener((address, 0), secret, "test-port"))
        made[-1].start(greet, host)
        return made[-1]

    yield port
    for one in made:
        one.close()


def answer(port: AuthenticatedListener, secret: Secret = KEY) -> bytes:
    with socket.create_connection(port.address, SOON) as own:
        secret.authenticate_to_listener(own)
        own.sendall(b"hello")
        return own.recv(100)


def is_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.001)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_authenticated_clients_are_served_and_others_are_refused(opened, caplog):
    port = opened()
    assert answer(port) == b"hello"
    with pytest.raises(secrets.HandshakeError, match="another key, or one end has none"):
        answer(port, Secret("test"))
    soon(lambda: "a connection is refused" in caplog.text)
    assert answer(port) == b"hello" and not port.pending_connections


def test_unauthenticated_connections_are_limited(opened, monkeypatch, caplog):
    monkeypatch.setattr(ports, "MAX_PENDING_CONNECTIONS", 4)
    port = opened()
    strangers = [socket.create_connection(port.address) for _ in range(20)]
    soon(lambda: sum(map(is_ended, strangers)) == 16)
    assert answer(port) == b"hello"
    assert "more than 4 connections at once" in caplog.text
    for one in strangers:
        one.close()
    soon(lambda: not port.pending_connections)


def test_unauthenticated_connections_that_trickle_bytes_are_closed(opened, monkeypatch):
    monkeypatch.setattr(secrets, "MESSAGE_SECONDS", 0.5)
    port = opened()
    strangers = [socket.create_connection(port.address) for _ in range(20)]
    staying = strangers
    for word in [b"\0", b"\0", b"\0", *[b"\x80"] * 2000]:
        staying = [one for one in strangers if not is_ended(one)]
        if not staying:
            break
        for one in staying:
            with suppress(OSError):
                one.sendall(word)
        time.sleep(0.05)
    for one in strangers:
        one.close()
    assert not staying and answer(port) == b"hello"


def test_a_failing_accept_is_logged_and_tried_again(opened, monkeypatch, caplog):
    fails = [OSError(24, "Too many open files"), OSError(103, "aborted"), OSError(105, "No buffer space")]
    monkeypatch.setattr(ports, "ACCEPT_RETRY_SECONDS", 0.01)
    accept = socket.socket.accept
    monkeypatch.setattr(
        socket.socket, "accept", lambda own: (_ for _ in ()).throw(fails.pop()) if fails else accept(own)
    )
    port = opened()
    assert answer(port) == b"hello" and not fails
    assert "Too many open files" in caplog.text and "No buffer space" in caplog.text
    assert "aborted" not in caplog.text


def test_a_failed_thread_start_costs_one_connection_only(opened, monkeypatch, caplog):
    port, start = opened(), ports.AuthenticatedListener._start_thread
    fails = [RuntimeError("can't start new thread")]

    def started(own: AuthenticatedListener, *given: object) -> None:
        if fails:
            raise fails.pop()
        start(own, *given)

    monkeypatch.setattr(AuthenticatedListener, "_start_thread", started)
    with pytest.raises((EOFError, OSError)):
        answer(port)
    assert (
        answer(port) == b"hello" and "can't start new thread" in caplog.text and not port.pending_connections
    )


PROCESS = """
import resource, sys, time
from duetto.serve.host.sockets.listener import AuthenticatedListener
from duetto.serve.host.sockets.secret import Secret

port = AuthenticatedListener(("127.0.0.1", 0), Secret("test"), "test-port")
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
print(port.address[1], flush=True)

def host(guest):
    with guest:
        guest.sendall(b"here")

port.start(lambda connection: connection if connection.recv(5) else None, host)
sys.stdin.read()
port.close()
"""


def test_a_process_without_descriptors_goes_on_when_it_has_some(opened):
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        address = "127.0.0.1", int(process.stdout.readline())
        strangers = [socket.create_connection(address) for _ in range(100)]
        assert b"Too many open files" in process.stderr.readline()
        for one in strangers:
            one.close()
        with socket.create_connection(address, SOON) as own:
            Secret("test").authenticate_to_listener(own)
            own.sendall(b"hello")
            assert own.recv(100) == b"here"
        process.stdin.close()
        assert process.wait(SOON) == 0


# ---------------------------------------------------------------- addresses


def test_an_address_that_others_reach_needs_a_key(opened):
    with pytest.raises(ValueError, match="0.0.0.0 port .* is not allowed without cluster_key_file"):
        opened(Secret("test"), "0.0.0.0")
    assert answer(opened(KEY, "0.0.0.0")) == b"hello"


LOCAL = "127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"
OTHER = "10.0.0.5:1", "0.0.0.0:1", "[::]:1", "host:1", "127.0.0.1.example:1"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_that_others_reach_need_a_key_file(role):
    for address in LOCAL:
        EngineOptions(kv_role=role, kv_address=address)
    for address in OTHER:
        with pytest.raises(ValueError, match=r"kv_address '.*' is not allowed without cluster_key_file"):
            EngineOptions(kv_role=role, kv_address=address)
        EngineOptions(kv_role=role, kv_address=address, cluster_key_file="key")
    if role == "decode":
        with pytest.raises(ValueError, match="without cluster_key_file"):
            EngineOptions(kv_role=role, kv_address="127.0.0.1:1,10.0.0.5:1")


def test_groups_that_others_reach_need_a_key_file():
    EngineOptions(nnodes=2)
    EngineOptions(nnodes=2, master_addr="10.0.0.1", cluster_key_file="key")
    with pytest.raises(ValueError, match=r"master_addr '10.0.0.1' is not allowed without cluster_key_file"):
        EngineOptions(nnodes=2, master_addr="10.0.0.1")


def test_a_key_without_use_is_refused():
    for options in ({}, {"kv_role": "both"}):
        with pytest.raises(ValueError, match="cluster_key_file is not allowed without kv_role prefill or"):
            EngineOptions(cluster_key_file="key", **options)
    with pytest.raises(ValueError, match="cluster_key_file '' is not allowed"):
        EngineOptions(nnodes=2, cluster_key_file="")
