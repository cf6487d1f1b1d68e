"""Page tables of groups: unlimited layers keep all pages, windowed ones what their next tokens see."""

import pytest

from duetto.kvcache.tables import NULL_PAGE, PageTables, max_window_pages

NAMES = [b"%d" % i for i in range(8)]


def mixed(pages: int = 16) -> PageTables:
    """Pages of 4 tokens; one group sees everything, the other the last 6; a step computes 8 tokens at
    most."""
    return PageTables((None, 6), (pages, 8), page_size=4, step_tokens=8)


def owned(table: list[int]) -> list[int]:
    return [i for i, page in enumerate(table) if page != NULL_PAGE]


def test_a_windowed_group_gives_back_what_is_behind():
    tables = mixed()
    sequence = tables.admit(tables.find_prefix([]), 20, max_tokens=24)
    assert [len(t) for t in sequence] == [5, 0]
    tables.advance_windows(sequence, 0, 8)
    assert [owned(t) for t in sequence] == [[0, 1, 2, 3, 4], [0, 1]]
    tables.advance_windows(sequence, 8, 16)  # a token at 8 sees 3 to 8
    assert owned(sequence[1]) == [0, 1, 2, 3]
    tables.advance_windows(sequence, 16, 17)  # 11 to 16
    assert owned(sequence[1]) == [2, 3, 4]
    assert tables.pools[1].num_free == 8 - 3 and tables.pools[0].num_free == 16 - 5
    tables.release(sequence, 24)
    assert tables.occupancy == 0 and tables.reserved_pages == [0, 0]


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("work", [1, 3, 8])
def test_no_sequence_owns_more_than_is_reserved(window, work):
    tables = PageTables((window,), (20,), page_size=4, step_tokens=work)
    sequence, most = tables.admit(tables.find_prefix([]), 60, max_tokens=60), 0
    for start in range(0, 60, work):
        tables.advance_windows(sequence, start, min(start + work, 60))
        most = max(most, len(owned(sequence[0])))
        first = max(0, start - window + 1)
        assert owned(sequence[0]) == list(range(first // 4, (min(start + work, 60) - 1) // 4 + 1))
    assert most <= tables.reserved_pages[0] == max_window_pages(window, work, 4)


def test_windowed_pages_are_reserved_and_admission_waits_for_them():
    tables = mixed(pages=64)
    reserved = max_window_pages(6, 8, 4)
    first = tables.admit(tables.find_prefix([]), 8, max_tokens=100)
    assert tables.reserved_pages == [0, reserved] and 2 * reserved > 8
    assert not tables.fits(tables.find_prefix([]), 8, max_tokens=100, spare_pages=0)
    # a short one never needs so many
    assert tables.fits(tables.find_prefix([]), 8, max_tokens=8, spare_pages=0)
    tables.release(first, 100)
    assert tables.fits(tables.find_prefix([]), 8, max_tokens=100, spare_pages=0)


def test_a_prefix_needs_its_end_within_the_window():
    tables = mixed()
    sequence = tables.admit(tables.find_prefix([]), 20, max_tokens=21)
    for start in (0, 8, 16):
        tables.advance_windows(sequence, start, min(start + 8, 20))
        tables.cache_pages(sequence, NAMES[: min(start + 8, 20) // 4], start // 4, range(20))
    tables.release(sequence, 21)
    found = tables.find_prefix(NAMES[:5])
    assert found[0] == sequence[0] and owned(found[1]) == [3, 4]  # a token at 20 sees 15 to 20
    # the pages that were released last keep their names longest
    tables.pools[1].allocate(tables.pools[1].num_free - 2)
    assert len(tables.find_prefix(NAMES[:5])[0]) < 5
    tables.reset_prefix_cache()
    assert tables.find_prefix(NAMES[:5]) == [[], []]


def test_an_unlimited_group_that_is_full_is_said_so():
    tables = mixed(pages=4)
    sequence = tables.admit(tables.find_prefix([]), 8, max_tokens=16)
    assert tables.grow(sequence, 16) and not tables.grow(sequence, 17)
    assert len(sequence[0]) == 4
    assert not tables.fits(tables.find_prefix([]), 1, max_tokens=2, spare_pages=0)
