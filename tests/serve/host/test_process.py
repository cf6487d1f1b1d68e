import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

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
def test_objects_that_outlive_a_long_collection_are_frozen(monkeypatch, long, lasts):
    monkeypatch.setattr(process, "LONG_COLLECTION_SECONDS", long)
    process.freeze_lasting_objects()
    kept = [[] for _ in range(100)]
    gc.collect()
    assert any(x is kept[0] for x in gc.get_objects()) == (not lasts)


def test_objects_of_the_start_are_frozen():
    kept: list[list[int]] = [[]]
    process.freeze_lasting_objects()
    assert not any(x is kept[0] for x in gc.get_objects())


def test_huge_pages_are_requested_for_large_arrays_and_counted(monkeypatch):
    x, small = jnp.zeros(1 << 21), jnp.zeros(8)
    asked: list[tuple[int, int, int]] = []

    def grants_the_even(start: int, size: int, advice: int) -> int:
        asked.append((start, size, advice))
        return -(start // process.HUGE_PAGE_BYTES % 2)

    monkeypatch.setattr(process, "read_huge_page_setting", lambda: "always [madvise] never")
    fake = SimpleNamespace(madvise=MagicMock(side_effect=grants_the_even))
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: fake)
    granted = process.use_huge_pages({"x": x, "small": small, "none": None})

    first = x.unsafe_buffer_pointer() // process.HUGE_PAGE_BYTES
    last = (x.unsafe_buffer_pointer() + x.nbytes - 1) // process.HUGE_PAGE_BYTES
    pages = [n * process.HUGE_PAGE_BYTES for n in range(first, last + 1)]
    assert sorted(asked) == [(start, process.HUGE_PAGE_BYTES, process.MADV_COLLAPSE) for start in pages]
    assert granted == sum(n % 2 == 0 for n in range(first, last + 1))
    assert process.use_huge_pages([small]) == 0


def test_arrays_keep_their_numbers_in_huge_pages():
    x = jnp.arange(1 << 21, dtype=jnp.float32)
    before = huge_bytes()
    granted = process.use_huge_pages([x])
    np.testing.assert_array_equal(x, np.arange(1 << 21, dtype=np.float32))
    if not granted or huge_bytes() <= before:
        pytest.skip("the system has no huge pages, or none is free now")


def huge_bytes() -> int:
    """Bytes of this process in huge pages."""
    found = re.findall(r"^AnonHugePages: +(\d+)", Path("/proc/self/smaps").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, found))


def test_huge_pages_that_are_off_stay_off(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "HUGE_PAGES_FILE", tmp_path / "enabled")
    process.HUGE_PAGES_FILE.write_text("always madvise [never]")
    assert process.use_huge_pages([jnp.zeros(1 << 20)]) == 0


def test_a_system_without_the_call_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert process.use_huge_pages([jnp.zeros(1 << 20)]) == 0
