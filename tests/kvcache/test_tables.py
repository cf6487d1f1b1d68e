"""Page tables of groups: unlimited layers keep all pages, windowed ones what their next tokens see."""

import pytest

from duetto.kvcache.tables import GONE, PageTables, window_pages

NAMES = [b"%d" % i for i in range(8)]


def mixed(pages: int = 16) -> PageTables:
    """Pages of 4 tokens; one group sees everything, the other the last 6; a step computes 8 tokens at
    most."""
    return PageTables((None, 6), (pages, 8), page_size=4, work=8)


def owned(table: list[int]) -> list[int]:
    return [i for i, page in enumerate(table) if page != GONE]


def test_a_windowed_group_gives_back_what_is_behind():
    tables = mixed()
    sequence = tables.admit(tables.find([]), 20, end=24)
    assert [len(t) for t in sequence] == [5, 0]
    tables.advance(sequence, 0, 8)
    assert [owned(t) for t in sequence] == [[0, 1, 2, 3, 4], [0, 1]]
    tables.advance(sequence, 8, 16)  # a token at 8 sees 3 to 8
    assert owned(sequence[1]) == [0, 1, 2, 3]
    tables.advance(sequence, 16, 17)  # 11 to 16
    assert owned(sequence[1]) == [2, 3, 4]
    assert tables.pools[1].free == 8 - 3 and tables.pools[0].free == 16 - 5
    tables.release(sequence, 24)
    assert tables.occupancy == 0 and tables.reserved == [0, 0]


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("work", [1, 3, 8])
def test_no_sequence_owns_more_than_is_reserved(window, work):
    tables = PageTables((window,), (20,), page_size=4, work=work)
    sequence, most = tables.admit(tables.find([]), 60, end=60), 0
    for start in range(0, 60, work):
        tables.advance(sequence, start, min(start + work, 60))
        most = max(most, len(owned(sequence[0])))
        first = max(0, start - window + 1)
        assert owned(sequence[0]) == list(range(first // 4, (min(start + work, 60) - 1) // 4 + 1))
    assert most <= tables.reserved[0] == window_pages(window, work, 4)


def test_windowed_pages_are_reserved_and_admission_waits_for_them():
    tables = mixed(pages=64)
    reserved = window_pages(6, 8, 4)
    first = tables.admit(tables.find([]), 8, end=100)
    assert tables.reserved == [0, reserved] and 2 * reserved > 8
    assert not tables.fits(tables.find([]), 8, end=100, spare=0)
    assert tables.fits(tables.find([]), 8, end=8, spare=0)  # a short one never needs so many
    tables.release(first, 100)
    assert tables.fits(tables.find([]), 8, end=100, spare=0)


def test_a_prefix_is_found_where_the_window_still_has_its_end():
    tables = mixed()
    sequence = tables.admit(tables.find([]), 20, end=21)
    for start in (0, 8, 16):
        tables.advance(sequence, start, min(start + 8, 20))
        tables.name(sequence, NAMES[: min(start + 8, 20) // 4], start // 4, range(20))
    tables.release(sequence, 21)
    found = tables.find(NAMES[:5])
    assert found[0] == sequence[0] and owned(found[1]) == [3, 4]  # a token at 20 sees 15 to 20
    tables.pools[1].issue(
        tables.pools[1].free - 2
    )  # the pages that were released last keep their names longest
    assert len(tables.find(NAMES[:5])[0]) < 5
    tables.forget()
    assert tables.find(NAMES[:5]) == [[], []]


def test_an_unlimited_group_that_is_full_is_said_so():
    tables = mixed(pages=4)
    sequence = tables.admit(tables.find([]), 8, end=16)
    assert tables.grow(sequence, 16) and not tables.grow(sequence, 17)
    assert len(sequence[0]) == 4
    assert not tables.fits(tables.find([]), 1, end=2, spare=0)
