"""Pages that a thread keeps: nobody waits for it, but the end of an engine until a time."""

import threading
import time

import pytest

from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.tier import page_key
from duetto.serve.kv.offload.write_behind import WriteBehindTier


def key(i: int) -> bytes:
    return page_key(i.to_bytes(16, "big"), 0)


def later_on() -> float:
    """A time that no test reaches."""
    return time.monotonic() + 600


class Stuck(HostTier):
    """A tier that takes pages once it may."""

    def __init__(self):
        super().__init__(1 << 20)
        self.may = threading.Event()

    def offer(self, key, content):
        assert self.may.wait(timeout=600)
        super().offer(key, content)


def test_a_slow_disk_delays_no_offer_and_hides_no_page():
    slow = Stuck()
    later, pages = WriteBehindTier(slow, max_bytes=20), [page_key(bytes([i]), 0) for i in range(4)]
    for i, key in enumerate(pages[:3]):
        later.offer(key, bytes([i]) * 10)
    assert [later.has(key) for key in pages] == [True, True, False, False]
    assert later.report()["left_out"] == 1
    assert later.fetch(pages[1]) == b"\1" * 10 and not slow.has(pages[1])
    slow.may.set()
    later.flush(later_on())
    assert [slow.has(key) for key in pages] == [True, True, False, False] and later.nbytes == 0
    later.offer(pages[3], b"more")  # another thread
    later.flush(later_on())
    assert slow.fetch(pages[3]) == later.fetch(pages[3]) == b"more"


def test_flushing_a_hanging_disk_has_a_timeout():
    stuck = Stuck()
    later, pages = WriteBehindTier(stuck), [page_key(bytes([i]), 0) for i in range(3)]
    for page in pages:
        later.offer(page, b"12345")
    assert later.flush(time.monotonic(), max_bytes=10) == later.flush(time.monotonic() + 0.01) == 3
    stuck.may.set()
    assert later.flush(later_on(), max_bytes=10) <= 2
    assert later.flush(later_on()) == 0


def test_one_thread_writes_all_pages(monkeypatch):
    begun, begin = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), begin(thread)))
    monkeypatch.setattr("duetto.serve.kv.offload.write_behind.WRITER_LINGER_SECONDS", 600.0)
    later = WriteBehindTier(HostTier(1000))
    for i in range(20):
        later.offer(key(i), b"12345")
        assert later.flush(later_on()) == 0
    assert len(begun) == 1


def test_a_tier_that_fails_keeps_the_next_page(caplog):
    class Failing(HostTier):
        def offer(self, key, content):
            if content == b"bad":
                raise MemoryError("no room")
            super().offer(key, content)

    later, bad, good = WriteBehindTier(Failing(100)), page_key(b"b", 0), page_key(b"g", 0)
    later.offer(bad, b"bad")
    later.offer(good, b"good")
    later.flush(later_on())
    assert not later.has(bad) and later.fetch(good) == b"good"
    assert "pages are not kept: MemoryError: no room" in caplog.text


def test_nothing_waits_for_a_thread_that_cannot_start(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    tier = HostTier(100)
    later, first, second = WriteBehindTier(tier), page_key(b"1", 0), page_key(b"2", 0)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        patched.setattr(threading.Thread, "start", fails)
        later.offer(first, b"first")
    later.flush(later_on())
    later.offer(second, b"second")
    later.flush(later_on())
    assert tier.fetch(first) == b"first" and tier.fetch(second) == b"second"
