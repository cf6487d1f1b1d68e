"""Pages read through NIXL: in time, undamaged, another way where they cannot be, and whoever ends."""

import os
import random
import subprocess
import sys
from collections.abc import Mapping

import pytest
from fakes.engine import ask, expected, prompt_of, run
from fakes.handover import REALM, WAYS, FakeSource, PrefillSide, decode_side, far_at, peer_of, soon

from duetto.serve.kv.disagg import client as client_module
from duetto.serve.kv.disagg.nixl import NixlAgent, import_nixl
from duetto.serve.kv.disagg.server import PrefillServer
from duetto.serve.kv.disagg.transport import PageTransport
from duetto.serve.runtime.multihost.supervisor import free_port

MOST = 1 << 20
KEYS = [bytes([i]) * 16 + b"\0" for i in range(8)]
PAGES = {key: random.Random(i).randbytes(MOST >> i) for i, key in enumerate(KEYS)}
OTHER_PROCESS = """
import random, sys
from duetto.serve.kv.disagg.server import PrefillServer
from duetto.serve.kv.disagg.nixl import NixlAgent

class Pages:
    room_bytes, is_connected = 1000, True
    def fetch(self, key):
        return random.Random(key[0]).randbytes(int(sys.argv[2]) >> key[0])

door = PrefillServer(("127.0.0.1", int(sys.argv[1])), {"nixl": NixlAgent()})
door.set_realm(b"fake", [int(sys.argv[2])])
door.serve(Pages())
sys.stdin.read()
"""


def test_without_its_package_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ValueError, match=r"kv_transport nixl is not allowed: .*duetto\[nixl\]"):
        import_nixl()


@pytest.fixture(scope="module")
def agents():
    pytest.importorskip("nixl")
    return {"nixl": NixlAgent()} | WAYS, {"nixl": NixlAgent()} | WAYS


@pytest.fixture
def reached(agents, monkeypatch):
    """Makes sources that are reached through a door, by an agent of NIXL on either side."""
    monkeypatch.setattr(client_module, "CONNECT_RETRY_SECONDS", 0.01)
    ends = []

    def reach(theirs: Mapping[str, PageTransport] = agents[0], seconds: float = 60.0):
        door, source = PrefillServer(("127.0.0.1", 0), theirs), FakeSource()
        source.pages = PAGES
        door.set_realm(REALM, [MOST])
        door.serve(source)
        far = far_at(door.address[1], seconds, agents[1])
        ends.extend((far, door))
        far.expect_realm(REALM, [MOST])
        soon(lambda: far.is_connected)
        return far, door

    yield reach
    for end in ends:
        end.close()


@pytest.mark.extras
def test_pages_arrive_intact_also_after_a_reconnection(reached):
    far, door = reached()
    for _ in range(3):
        soon(lambda: far.is_connected)
        assert far.transport == "nixl"
        assert all(far.fetch(key) == PAGES[key] for key in KEYS) and far.fetch(b"m" * 17) is None
        first = far._link
        door.set_realm(REALM, [MOST])  # sends everybody away
        soon(lambda link=first: far._link is not link)


@pytest.mark.extras
def test_a_damaged_page_is_not_taken(reached, monkeypatch):
    far, _ = reached()
    monkeypatch.setattr("duetto.serve.kv.disagg.server.page_checksum", lambda *_: 0)
    assert far.fetch(KEYS[0]) is None and far.damaged == 1 and far.is_connected


@pytest.mark.extras
def test_peers_without_nixl_use_another_transport(reached, caplog):
    far, _ = reached(WAYS)
    assert "do not come through nixl: it has none" in caplog.text
    assert far.transport != "nixl" and far.fetch(KEYS[0]) == PAGES[KEYS[0]]


@pytest.mark.extras
def test_late_reads_fall_back_to_another_transport(reached, monkeypatch, caplog):
    monkeypatch.setattr(NixlAgent, "has_notification", lambda *_: False)  # the owner moves nothing on
    far, _ = reached(seconds=0.3)
    assert far.fetch(KEYS[0]) is None
    soon(lambda: far.is_connected and far.fetch(KEYS[0]) == PAGES[KEYS[0]])
    assert "nothing was read" in caplog.text and far.transport != "nixl"


@pytest.mark.extras
def test_pages_are_read_again_after_a_process_is_killed(agents, monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_RETRY_SECONDS", 0.01)
    far = far_at(port := free_port(), ways=agents[1])
    far.expect_realm(REALM, [MOST])
    other_process = [sys.executable, "-c", OTHER_PROCESS, str(port), str(MOST)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        with subprocess.Popen(other_process, stdin=subprocess.PIPE, env=os.environ | path) as other:
            soon(lambda: far.is_connected)
            assert far.transport == "nixl"
            assert all(far.fetch(key) == PAGES[key] for key in KEYS)
            other.kill()
            assert far.fetch(KEYS[0]) is None
        soon(lambda: not far.is_connected)
    far.close()


@pytest.mark.extras
@pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes
def test_pages_are_computed_in_one_engine_and_found_in_another(agents):
    side = PrefillSide(ways=agents[0])
    far = far_at(side.port, ways=agents[1])
    engine = decode_side(far)
    soon(lambda: far.is_connected)
    assert far.transport == "nixl"
    requests = [ask(prompt_of(i // 2, 13 + 4 * i, own=4 * (i % 2)), 6, i) for i in range(5)]
    for request in requests:
        engine.submit(request)
    run(engine, 100_000)
    assert [r.output_tokens for r in requests] == [expected(r)[0] for r in requests]
    assert all(r.num_cached_tokens == (len(r.prompt) - 1) // 4 * 4 for r in requests)
    assert peer_of(engine).answered == 5
    far.close()
    side.end()
