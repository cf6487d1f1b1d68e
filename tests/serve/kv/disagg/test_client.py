"""Pages between processes: over TCP and in shared memory, in time, undamaged, and whoever ends."""

import errno
import os
import random
import socket
import threading
import time
from typing import Any

import pytest
from fakes.engine import ask, expected, prompt_of
from fakes.handover import REALM, WAYS, FakeSource, PrefillSide, decode_side, far_at, peer_of, soon

from duetto.serve.host.sockets.handshake import HandshakeRejected
from duetto.serve.host.sockets.listener import AuthenticatedListener
from duetto.serve.host.sockets.message_link import Link
from duetto.serve.host.sockets.secret import Secret
from duetto.serve.kv.disagg import client as client_module
from duetto.serve.kv.disagg import server as server_module
from duetto.serve.kv.disagg import shared_memory
from duetto.serve.kv.disagg.messages import PREFILL_DECODER
from duetto.serve.kv.disagg.server import PrefillServer
from duetto.serve.kv.disagg.shared_memory import PROOF_BYTES, SharedMemoryReader, SharedMemoryWriter
from duetto.serve.kv.disagg.tcp import TcpTransport
from duetto.serve.kv.disagg.transport import make_transports

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes
KEY, PAGE = b"n" * 16 + b"\0", os.urandom(64)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "REFUSED_RETRY_SECONDS", 0.01)


@pytest.fixture
def reached():
    """Makes sources that are reached through a door."""
    ends = []

    def reach(
        source: FakeSource,
        seconds: float = 60.0,
        realm: bytes = REALM,
        keys=(None, None),
        ways=(WAYS, WAYS),
        meets=True,
    ):
        door = PrefillServer(("127.0.0.1", 0), ways[0], keys[0])
        door.set_realm(REALM, [len(PAGE)])
        door.serve(source)
        far = far_at(door.address[1], seconds, ways[1], keys[1])
        ends.extend((far, door))
        far.expect_realm(realm, [len(PAGE)])
        if meets and realm == REALM and keys[0] == keys[1]:
            soon(lambda: far.is_connected)
        return far, door

    yield reach
    for end in ends:
        end.close()


@pytest.mark.parametrize("shared", [True, False])
def test_pages_and_answers_arrive_as_they_were_sent(reached, monkeypatch, shared):
    if shared and not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memory without a file")
    if not shared:
        monkeypatch.setattr(
            shared_memory.os, "memfd_create", lambda _: os.open("/nowhere/at/all", 0), raising=False
        )
    source, told = FakeSource(), []
    source.pages[KEY] = PAGE
    far, _ = reached(source)
    first, *_ = WAYS  # where a transport is added here, it is the first
    wanted = "tcp" if first == "shared_memory" and not shared else first
    assert far.transport == wanted and far.room_bytes == source.room_bytes
    far.begin_prefill([1, 2, 3], told.append)
    soon(lambda: bool(source.asked))
    source.asked[0][1]([KEY])
    soon(lambda: bool(told))
    assert source.asked[0][0] == (1, 2, 3) and told == [(KEY,)]
    assert far.fetch(KEY) == PAGE and far.fetch(b"m" + KEY[1:]) is None


class Unusable:
    """A transport whose package fails with an error of its own."""

    class PackageError(Exception):
        """No OSError and no ValueError."""

    def open_writer(self, size: int) -> Any:
        raise self.PackageError("no device")

    open_reader = open_writer


class Closing(TcpTransport):
    """Counts the writers that are open."""

    open = 0

    def open_writer(self, size: int) -> "Closing":
        self.open += 1
        return self

    def close(self) -> None:
        self.open -= 1


def test_a_failing_transport_falls_back_to_the_next(reached, caplog):
    source, tcp = FakeSource(), Closing()
    source.pages[KEY] = PAGE
    far, door = reached(
        source, ways=({"own": Unusable(), "tcp": tcp}, {"own": Unusable(), "tcp": TcpTransport()})
    )
    assert far.transport == "tcp" and far.fetch(KEY) == PAGE and tcp.open == 1
    assert "pages are not offered through own: PackageError: no device" in caplog.text
    door.set_realm(None, ())
    soon(lambda: not tcp.open)


def test_writers_are_closed_where_no_connection_is_made(reached, monkeypatch):
    def failing(*_: Any) -> Any:
        raise ValueError("as a test wants it")

    monkeypatch.setattr(server_module, "PrefillConnection", failing)
    made = []

    class Noted(Closing):
        def open_writer(self, size: int) -> Closing:
            made.append(size)
            return super().open_writer(size)

    tcp = Noted()
    reached(FakeSource(), ways=({"tcp": tcp}, WAYS), meets=False)
    soon(lambda: bool(made) and not tcp.open)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("tcp", "shared_memory"), ("shared_memory", "tcp"), ("tcp", None)]
)
def test_the_reader_chooses_the_transport(reached, ours, theirs):
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memory without a file")
    source = FakeSource()
    source.pages[KEY] = PAGE
    far, _ = reached(source, ways=(make_transports(theirs), make_transports(ours)))
    assert far.transport == ours and far.fetch(KEY) == PAGE


def test_engines_without_a_common_transport_do_not_connect(reached, caplog):
    far, _ = reached(FakeSource(), ways=({}, WAYS), meets=False)
    soon(lambda: f"it offers pages through no transport of {', '.join(WAYS)}" in caplog.text)
    assert not far.is_connected and far.transport is None


def test_an_engine_of_another_protocol_is_refused_by_name(reached):
    _, door = reached(FakeSource())
    with socket.create_connection(door.address) as older:
        Secret("pages").authenticate_to_listener(older)
        link = Link(older, 60.0, PREFILL_DECODER)
        link.send({"type": "Hello", "realm": REALM, "page_bytes": [len(PAGE)]})
        answer = link.receive()
    assert isinstance(answer, HandshakeRejected) and "protocol 1 of pages" in answer.why


def test_a_prefill_engine_of_another_protocol_is_named(caplog):
    """It closes the connection: the first message is none that it knows."""
    older = AuthenticatedListener(("127.0.0.1", 0), Secret("pages"), "older")
    older.start(lambda connection: None, lambda guest: None)
    far = far_at(older.address[1])
    far.expect_realm(REALM, [len(PAGE)])
    soon(lambda: "closed the connection unanswered, as another version may" in caplog.text)
    far.close()
    older.close()


def test_a_damaged_page_is_not_taken(reached, monkeypatch):
    source = FakeSource()
    source.pages[KEY] = PAGE
    far, _ = reached(source)
    monkeypatch.setattr("duetto.serve.kv.disagg.server.page_checksum", lambda *_: 0)
    assert far.fetch(KEY) is None and far.damaged == 1


def test_a_slow_source_is_disconnected_and_reconnected(reached):
    source, may = FakeSource(), threading.Event()
    source.pages[KEY], source.before = PAGE, lambda: may.wait(60)
    far, _ = reached(source, seconds=0.1)
    assert far.fetch(KEY) is None
    may.set()
    soon(lambda: far.is_connected and far.fetch(KEY) == PAGE)


def test_clients_with_other_page_sizes_are_refused(reached, caplog):
    far, door = reached(FakeSource(), realm=b"others")
    soon(lambda: "computes no prompts for this engine" in caplog.text)
    told = []
    far.begin_prefill([1], told.append)
    assert not far.is_connected and told == [[]] and far.fetch(KEY) is None
    door.set_realm(b"others", [len(PAGE)])
    soon(lambda: far.is_connected)


def test_other_parameters_disconnect_all_clients(reached):
    source, told = FakeSource(), []
    source.pages[KEY] = PAGE
    far, door = reached(source)
    far.begin_prefill([1], told.append)
    soon(lambda: bool(source.asked))
    door.set_realm(b"others", [len(PAGE)])
    soon(lambda: bool(told))
    assert told == [[]] and far.fetch(KEY) is None
    soon(lambda: source.left == [0])


def test_connections_of_other_programs_do_no_harm(reached):
    source = FakeSource()
    source.pages[KEY] = PAGE
    far, door = reached(source)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc0", b"\xff" * 64):
        with socket.create_connection(door.address) as stranger:
            stranger.sendall(words)
    assert far.fetch(KEY) == PAGE


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "b"), ("a", None), (None, "a")])
def test_only_engines_with_the_same_key_connect(reached, tmp_path, caplog, keys):
    files = {None: None}
    for name in "ab":
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(16 * name)
        (tmp_path / name).chmod(0o600)
    source = FakeSource()
    source.pages[KEY] = PAGE
    far, _ = reached(source, keys=tuple(files[name] for name in keys))
    if keys[0] != keys[1]:
        soon(lambda: "cluster_key_file: the other end has another key, or one end has none" in caplog.text)
        assert not far.is_connected
    assert far.fetch(KEY) == (PAGE if keys[0] == keys[1] else None)


def test_a_port_outlives_a_process_without_descriptors(reached, monkeypatch):
    accept, fails = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accepted(own: socket.socket) -> object:
        if fails:
            raise fails.pop()
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    source = FakeSource()
    source.pages[KEY] = PAGE
    far, _ = reached(source)
    assert far.fetch(KEY) == PAGE and not fails


def test_shared_memory_of_another_host_is_refused():
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memory without a file")
    own = SharedMemoryWriter(64)
    own.write(PAGE)
    seen = SharedMemoryReader(own.offer)
    assert seen.read(64, b"", 0.0) == PAGE
    another = bytes(PROOF_BYTES) + own.offer[PROOF_BYTES:]
    for offer in (another, b"root:x:0:0:root:/etc/passwd", b""):
        with pytest.raises(ValueError):
            SharedMemoryReader(offer)
    own.close()
    with pytest.raises(OSError):
        SharedMemoryReader(own.offer)
    assert seen.read(64, b"", 0.0) == PAGE
    seen.close()


def finished(engine, *requests, sight=None) -> None:
    until = time.monotonic() + 60
    while engine.has_work:
        engine.step()
        assert time.monotonic() < until
    assert [r.output_tokens for r in requests] == [expected(r, sight=sight)[0] for r in requests]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_pages_are_computed_in_one_engine_and_found_in_another(windows):
    side = PrefillSide(windows=windows)
    far = far_at(side.port)
    engine = decode_side(far, windows=windows)
    soon(lambda: far.is_connected)
    requests = [ask(prompt_of(i // 2, 13 + 4 * i, own=4 * (i % 2)), 6, i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    finished(engine, *requests, sight=windows[0])
    assert all(r.num_cached_tokens == (len(r.prompt) - 1) // 4 * 4 for r in requests)
    assert peer_of(engine).answered == 5
    far.close()
    side.end()


def test_prompts_refused_by_the_prefill_engine_are_computed_locally():
    side = PrefillSide(max_model_len=12)
    far = far_at(side.port)
    engine = decode_side(far)
    soon(lambda: far.is_connected)
    long = ask(prompt_of(0, 30), 4)
    engine.submit(long)
    finished(engine, long)
    assert long.num_cached_tokens == 0 and peer_of(engine).late == 0
    far.close()
    side.end()


class Sides:
    """Two engines that are joined, either of which may be ended and started again."""

    def __init__(self):
        self.prefill = PrefillSide()
        self.begin()

    def begin(self) -> None:
        self.far = far_at(self.prefill.port)
        self.engine = decode_side(self.far)

    def join(self) -> None:
        soon(lambda: self.far.is_connected)

    def end_prefill(self) -> None:
        self.prefill.end()
        self.prefill = PrefillSide(self.prefill.port)

    def end_decode(self) -> None:
        self.far.close()
        self.engine.close()
        self.begin()
        soon(lambda: not self.prefill.prefills._prompts and not self.prefill.prefills._offers)


def test_either_engine_may_stop_at_any_time():
    """The one that prefills: requests go on. The one that decodes: its requests end with it, and nothing of
    them stays with the other, which serves the next."""
    chance, count, sides = random.Random(0), len(threading.enumerate()), Sides()
    for kill in range(30):
        if kill % 3:
            sides.join()
        prompts = [prompt_of(chance.randrange(6), 9 + 4 * chance.randrange(6)) for _ in range(4)]
        requests = [ask(prompt, 5, 4 * kill + i) for i, prompt in enumerate(prompts)]
        for request in requests:
            sides.engine.submit(request)
        for _ in range(chance.randrange(8)):
            sides.engine.step()
            time.sleep(chance.random() / 1000)
        if kill % 2:
            sides.end_prefill()
            finished(sides.engine, *requests)
        else:
            sides.end_decode()
    sides.join()
    last = ask(prompt_of(7, 21), 5, 1000)
    sides.engine.submit(last)
    finished(sides.engine, last)
    assert last.num_cached_tokens == 20
    sides.far.close()
    sides.engine.close()
    sides.prefill.end()
    soon(lambda: len(threading.enumerate()) <= count)
