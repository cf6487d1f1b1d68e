"""Pages that a thread keeps: nobody waits for it, but the end of an engine until a time."""

import threading
import time

import pytest

from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.later import WriteBehindTier
from duetto.serve.kv.offload.tier import key_of


def key(i: int) -> bytes:
    return key_of(i.to_bytes(16, "big"), 0)


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


def test_a_slow_disk_delays_nobody_and_pages_are_found_before_they_are_written():
    slow = Stuck()
    later, pages = WriteBehindTier(slow, most_bytes=20), [key_of(bytes([i]), 0) for i in range(4)]
    for i, key in enumerate(pages[:3]):
        later.offer(key, bytes([i]) * 10)
    assert [later.has(key) for key in pages] == [True, True, False, False]
    assert later.report()["left_out"] == 1
    assert later.fetch(pages[1]) == b"\1" * 10 and not slow.has(pages[1])
    slow.may.set()
    later.settle(later_on())
    assert [slow.has(key) for key in pages] == [True, True, False, False] and later.nbytes == 0
    later.offer(pages[3], b"more")  # another thread
    later.settle(later_on())
    assert slow.fetch(pages[3]) == later.fetch(pages[3]) == b"more"


def test_a_disk_that_hangs_is_waited_for_until_a_time():
    stuck = Stuck()
    later, pages = WriteBehindTier(stuck), [key_of(bytes([i]), 0) for i in range(3)]
    for page in pages:
        later.offer(page, b"12345")
    assert later.settle(time.monotonic(), most=10) == later.settle(time.monotonic() + 0.01) == 3
    stuck.may.set()
    assert later.settle(later_on(), most=10) <= 2
    assert later.settle(later_on()) == 0


def test_one_thread_passes_on_all_pages(monkeypatch):
    begun, begin = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread), begin(thread)))
    monkeypatch.setattr("duetto.serve.kv.offload.later.LINGER", 600.0)
    later = WriteBehindTier(HostTier(1000))
    for i in range(20):
        later.offer(key(i), b"12345")
        assert later.settle(later_on()) == 0
    assert len(begun) == 1


def test_a_tier_that_fails_keeps_the_next_page(caplog):
    class Failing(HostTier):
        def offer(self, key, content):
            if content == b"bad":
                raise MemoryError("no room")
            super().offer(key, content)

    later, bad, good = WriteBehindTier(Failing(100)), key_of(b"b", 0), key_of(b"g", 0)
    later.offer(bad, b"bad")
    later.offer(good, b"good")
    later.settle(later_on())
    assert not later.has(bad) and later.fetch(good) == b"good"
    assert "pages are not kept: MemoryError: no room" in caplog.text


def test_a_thread_that_cannot_begin_is_waited_for_by_nobody(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    tier = HostTier(100)
    later, first, second = WriteBehindTier(tier), key_of(b"1", 0), key_of(b"2", 0)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        patched.setattr(threading.Thread, "start", fails)
        later.offer(first, b"first")
    later.settle(later_on())
    later.offer(second, b"second")
    later.settle(later_on())
    assert tier.fetch(first) == b"first" and tier.fetch(second) == b"second"
