"""How ranks meet: those that know the key and run the same, whatever else comes to the port."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from duetto.serve.host.sockets.handshake import Handshake, HandshakeRejected
from duetto.serve.host.sockets.message_link import Link
from duetto.serve.host.sockets.secret import HandshakeError, Secret
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.multihost import rendezvous
from duetto.serve.runtime.multihost.messages import GROUP_DECODER
from duetto.serve.runtime.multihost.supervisor import TOKEN_VARIABLE, free_port

SOON = 60.0  # seconds in which a rank must have come


def connected(options: EngineOptions) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    until = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection((options.master_addr, options.master_port))
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    "facts, expected",
    [
        ([{"jax": "1"}], "jax is 1 in rank 1 and 2 in rank 0"),
        ([{"jax": "2"}] * 2, "node_rank 1 is not allowed: rank 2 is missing"),
    ],
)
def test_ranks_that_do_not_fit_the_group_are_refused(facts: list[dict[str, str]], expected: str, monkeypatch):
    """Strangers are not heeded, whatever they send."""
    monkeypatch.setenv(TOKEN_VARIABLE, "a start's own")
    options = EngineOptions(nnodes=3, master_port=free_port())
    said: list[Any] = []

    def gather() -> None:
        try:
            rendezvous.accept_ranks(options, {"jax": "2"})
        except ValueError as error:
            said.append(str(error))

    gathering = threading.Thread(target=gather)
    gathering.start()
    links: list[Link] = []
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", None, *facts):
        own = connected(options)
        if isinstance(sent, bytes):
            own.sendall(sent)
            own.close()
            continue
        secret = Secret("group", b"another start's") if sent is None else rendezvous.group_secret(options)
        with suppress(HandshakeError):
            secret.authenticate_to_listener(own)
        links.append(Link(own, SOON, GROUP_DECODER))
        with suppress(OSError):
            links[-1].send(Handshake(sent or {"jax": "1"}, 1))
    gathering.join(SOON)
    assert said == [expected]
    assert links[-1].receive() == HandshakeRejected(expected)
    for link in links:
        link.close()


def test_ranks_with_another_key_are_refused_and_end(tmp_path, monkeypatch):
    """Rank 0 goes on waiting for those that have its own."""
    files = [tmp_path / name for name in ("ours", "theirs")]
    for file in files:
        file.write_text(16 * file.name[0])
        file.chmod(0o600)
    own = EngineOptions(nnodes=2, master_port=free_port(), cluster_key_file=str(files[0]))
    monkeypatch.setattr(rendezvous, "JOIN_RETRY_SECONDS", 0.01)
    with ThreadPoolExecutor(2) as pool:
        gathering = pool.submit(rendezvous.accept_ranks, own, {"jax": "2"})
        for file in (str(files[1]), None):
            with pytest.raises(ValueError, match="cluster_key_file: the other end has another key"):
                rendezvous.connect_to_rank_0(replace(own, node_rank=1, cluster_key_file=file), {"jax": "2"})
        joining = pool.submit(rendezvous.connect_to_rank_0, replace(own, node_rank=1), {"jax": "2"})
        links = [*gathering.result(SOON), joining.result(SOON)]
    for link in links:
        link.close()


def test_silent_connections_do_not_delay_a_group():
    options = EngineOptions(nnodes=2, master_port=free_port())
    with ThreadPoolExecutor(2) as pool:
        gathering = pool.submit(rendezvous.accept_ranks, options, {"jax": "2"})
        strangers = [connected(options) for _ in range(30)]
        begin = time.monotonic()
        joining = pool.submit(rendezvous.connect_to_rank_0, replace(options, node_rank=1), {"jax": "2"})
        links = [*gathering.result(SOON), joining.result(SOON)]
        assert time.monotonic() - begin < 30 * rendezvous.HANDSHAKE_SECONDS / 2
    for end in (*links, *strangers):
        end.close()
