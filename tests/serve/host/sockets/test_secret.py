"""A key that both ends of a connection have to know, and the file that it is in."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from duetto.serve.host.sockets.message_link import Link
from duetto.serve.host.sockets.secret import (
    DECODER,
    Challenge,
    ChallengeResponse,
    Denied,
    HandshakeError,
    Proof,
    Secret,
    read_key,
)

KEY = Secret("pages", b"k" * 32)
LONG = 60.0


@pytest.fixture
def pair():
    """The two ends of a connection, the caller's first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    yield first, second
    first.close()
    second.close()


def outcomes(*works: Callable[[], None]) -> list[str]:
    """What comes of works that run at the same time: nothing, or the name of an error."""

    def one(work: Callable[[], None]) -> str:
        try:
            work()
        except (HandshakeError, EOFError, ValueError, OSError) as error:
            return type(error).__name__
        return ""

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(one, works))


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_peers_with_the_same_key_connect(pair, key):
    secret = Secret("pages", key)
    assert outcomes(
        lambda: secret.authenticate_to_listener(pair[0]), lambda: secret.authenticate_caller(pair[1])
    ) == ["", ""]


@pytest.mark.parametrize(
    "other", [Secret("pages", b"j" * 32), Secret("pages"), Secret("group", b"k" * 32)], ids=str
)
def test_peers_with_different_keys_refuse_each_other(pair, other):
    assert outcomes(
        lambda: other.authenticate_to_listener(pair[0]), lambda: KEY.authenticate_caller(pair[1])
    ) == [
        "HandshakeError",
        "HandshakeError",
    ]
    assert "kkkk" not in repr(KEY)


def test_peers_with_swapped_keys_refuse_each_other(pair):
    found = outcomes(
        lambda: KEY.authenticate_to_listener(pair[0]), lambda: Secret("pages").authenticate_caller(pair[1])
    )
    assert found == ["HandshakeError", "HandshakeError"]


def test_a_replayed_proof_is_refused(pair):
    caller, listener = (Link(end, LONG, DECODER) for end in pair)
    recorded = []

    def call() -> None:
        challenge = caller.receive()
        assert isinstance(challenge, Challenge)
        proof = KEY._proof("caller", challenge.nonce, b"n" * 32)
        answer = recorded[0] if recorded else ChallengeResponse(b"n" * 32, proof)
        recorded.append(answer)
        caller.send(answer)
        assert isinstance(caller.receive(), Denied if len(recorded) > 1 else Proof)

    assert outcomes(call, lambda: KEY.authenticate_caller(pair[1])) == ["", ""]
    assert outcomes(call, lambda: KEY.authenticate_caller(pair[1])) == ["", "HandshakeError"]
    assert listener.is_closed is False


def test_a_reflected_proof_is_refused(pair):
    """A listener without the key, which takes both its number and its proof from the caller."""
    link = Link(pair[1], LONG, DECODER)

    def listen(nonce: bytes) -> None:
        link.send(Challenge(nonce))
        answer = link.receive()
        assert isinstance(answer, ChallengeResponse)
        link.send(Proof(answer.proof))

    assert outcomes(lambda: KEY.authenticate_to_listener(pair[0]), lambda: listen(b"n" * 32)) == [
        "HandshakeError",
        "",
    ]


ANSWERS = ChallengeResponse(b"", b""), ChallengeResponse(b"n" * 32, b"")


@pytest.mark.parametrize(
    "word", [Denied(), Proof(b""), Proof(b"x" * 32), Challenge(b"n" * 32), *ANSWERS], ids=repr
)
def test_no_other_message_authenticates_a_caller(pair, word):
    link = Link(pair[0], LONG, DECODER)

    def call() -> None:
        link.receive()
        link.send(word)

    assert outcomes(call, lambda: KEY.authenticate_caller(pair[1]))[1] in ("HandshakeError", "ValueError")


@pytest.mark.parametrize("word", [Denied(), Proof(b""), Proof(b"x" * 32), Challenge(b"n" * 32)])
def test_no_other_message_authenticates_a_listener(pair, word):
    link = Link(pair[1], LONG, DECODER)

    def listen() -> None:
        link.send(Challenge(b"n" * 32))
        link.receive()
        link.send(word)

    assert outcomes(lambda: KEY.authenticate_to_listener(pair[0]), listen)[0] == "HandshakeError"


def test_long_handshake_messages_are_refused(pair):
    pair[0].sendall(msgspec.msgpack.encode("x" * 5000))
    assert outcomes(lambda: KEY.authenticate_caller(pair[1])) == ["ValueError"]


def test_a_message_has_one_timeout(pair):
    """Bytes that come one by one do not make it longer."""
    begun, ended = threading.Event(), threading.Event()

    def drip() -> None:
        pair[0].sendall(b"\0\1\0\0")
        while not ended.wait(0.05):
            pair[0].sendall(b"x")
            begun.set()

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert begun.wait(LONG)
    with pytest.raises(TimeoutError, match="of 65536 bytes came within 0.5 s"):
        Link(pair[1], 0.5, DECODER).receive()
    ended.set()
    dripping.join()


def test_idle_connections_wait_but_begun_messages_time_out(pair):
    link = Link(pair[1], 0.05, DECODER)

    def send() -> None:
        link.set_timeout(LONG)  # of the message, whatever the machine does meanwhile
        Link(pair[0], LONG, DECODER).send(Denied())

    threading.Timer(0.5, send).start()
    assert link.receive(may_idle=True) == Denied()
    link.set_timeout(0.05)
    pair[0].sendall(b"\0")
    with pytest.raises(TimeoutError):
        link.receive(may_idle=True)


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "content, mode, why",
    [
        (b"k" * 64, 0o644, r"others own it or may read it \(mode 0644\): chmod 600"),
        (b"k" * 64, 0o602, r"others own it or may read it \(mode 0602\): chmod 600"),
        (b"short\n", 0o600, "5 bytes, expected 16 to 65536; make one with `openssl rand -hex 32`"),
        (b" \n", 0o600, "0 bytes"),
        (b"k" * 70000, 0o600, "65537 bytes"),
    ],
)
def test_a_file_that_keeps_no_secret_is_refused(tmp_path, content, mode, why):
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"cluster_key_file '.*key' is not allowed: {why}"):
        read_key(str(file))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(ValueError, match="directory"):
        read_key(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="it is no file"):
        read_key(str(tmp_path / "pipe"))


def test_a_key_is_its_file_without_the_newline(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    assert read_key(str(file)) == b"0123456789abcdef" and read_key(None) == b""
