import gc
from collections.abc import Iterator

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
