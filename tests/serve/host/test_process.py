import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from duetto.serve.host import process


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Collections look at what these tests make, not at all that the process holds."""
    gc.freeze()
    yield
    gc.unfreeze()
    gc.freeze()


@pytest.fixture(autouse=True)
def callbacks_kept() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks


@pytest.mark.parametrize(("long", "lasts"), [(0.0, True), (float("inf"), False)])
def test_what_outlives_a_long_collection_is_passed_over(monkeypatch, long, lasts):
    monkeypatch.setattr(process, "LONG", long)
    process.freeze_what_lasts()
    kept = [[] for _ in range(100)]
    gc.collect()
    assert any(x is kept[0] for x in gc.get_objects()) == (not lasts)


def test_what_is_there_at_the_start_is_passed_over():
    kept: list[list[int]] = [[]]
    process.freeze_what_lasts()
    assert not any(x is kept[0] for x in gc.get_objects())


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping with an address."""
    mapping = r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+)"
    found = re.findall(mapping, Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL)
    return next(1024 * int(n) for low, high, n in found if int(low, 16) <= address < int(high, 16))


def test_large_arrays_move_into_huge_pages_and_keep_their_numbers():
    x, small = jnp.arange(1 << 21, dtype=jnp.float32), jnp.zeros(8)
    if not process.use_huge_pages([x]):
        pytest.skip("the system has no huge pages")

    def moves() -> bool:
        found = process.use_huge_pages({"x": x, "small": small, "none": None})
        assert found <= x.nbytes // process.HUGE_PAGE + 1
        huge = huge_bytes(x.unsafe_buffer_pointer() + process.HUGE_PAGE)
        return x.nbytes // process.HUGE_PAGE - 1 <= found <= huge // process.HUGE_PAGE

    assert any(moves() for _ in range(20))  # a system that lacks memory splits pages at any moment
    np.testing.assert_array_equal(x, np.arange(1 << 21, dtype=np.float32))
    assert process.use_huge_pages([small]) == 0


def test_a_system_that_has_them_off_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "HUGE_PAGES", tmp_path / "enabled")
    process.HUGE_PAGES.write_text("always madvise [never]")
    assert process.use_huge_pages([jnp.zeros(1 << 20)]) == 0


def test_a_system_without_the_call_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert process.use_huge_pages([jnp.zeros(1 << 20)]) == 0
