"""Pages: owned, shared, released, and found again by name until they are issued."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetto.kvcache.pool import PagePool


def name(i: int) -> bytes:
    return b"name %d" % i


def found(pool: PagePool, *numbers: int) -> list[int]:
    """Pages of the longest prefix of names that is here."""
    pages = [pool.find(name(i)) for i in numbers]
    return [page for page in itertools.takewhile(lambda page: page is not None, pages) if page is not None]


def test_pages_are_issued_once_and_come_back():
    pool = PagePool(4)
    first, second = pool.issue(3), pool.issue(1)
    assert sorted(first + second) == [0, 1, 2, 3] and pool.free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.issue(1)
    pool.release(first)
    assert pool.free == 3 and pool.references == [int(page in second) for page in range(4)]
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(first)


def test_a_released_page_keeps_its_name_until_it_is_issued():
    pool = PagePool(2)
    page = pool.issue(1)[0]
    pool.name(page, name(0))
    pool.release([page])
    assert found(pool, 0) == [page] and pool.idle([page]) == 1
    pool.issue(2)
    assert found(pool, 0) == []


def test_a_shared_page_returns_with_its_last_owner():
    pool = PagePool(3)
    page = pool.issue(1)[0]
    pool.name(page, name(0))
    pool.share(found(pool, 0))
    pool.release([page])
    assert pool.free == 2 and pool.idle([page]) == 0
    pool.release([page])
    assert pool.free == 3
    pool.share([page])
    assert pool.free == 2 and page not in pool.issue(2)


def test_unnamed_pages_go_first_then_the_longest_released_from_the_end_of_a_sequence():
    pool = PagePool(6)
    old, new, unnamed = pool.issue(2), pool.issue(2), pool.issue(2)
    for i, page in enumerate(old + new):
        pool.name(page, name(i))
    for pages in (old, new, unnamed):
        pool.release(pages)
    assert pool.issue(6) == [*unnamed, *reversed(old), *reversed(new)]


def test_sharing_makes_a_page_young_again():
    pool = PagePool(2)
    pages = pool.issue(2)
    for i, page in enumerate(pages):
        pool.name(page, name(i))
    pool.release(pages[:1])
    pool.release(pages[1:])
    pool.share(pages[:1])
    pool.release(pages[:1])
    assert pool.issue(1) == pages[1:]


def test_the_first_page_of_a_name_keeps_it():
    pool = PagePool(2)
    first, second = pool.issue(2)
    pool.name(first, name(0))
    pool.name(second, name(0))
    pool.name(first, name(1))
    assert found(pool, 0) == [first] and found(pool, 1) == []
    pool.release([first, second])
    assert pool.issue(1) == [second]  # it has no name


def test_forgotten_names_are_not_found_and_their_pages_stay_with_their_owners():
    pool = PagePool(3)
    pages = pool.issue(2)
    pool.name(pages[0], name(0))
    pool.forget()
    assert found(pool, 0) == [] and pool.free == 1
    pool.name(pages[1], name(0))
    assert found(pool, 0) == pages[1:]


OPERATIONS = st.tuples(
    st.sampled_from(["issue", "name", "share", "release", "release", "forget"]), st.integers(0, 7)
)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.integers(1, 6), st.lists(OPERATIONS, max_size=40))
def test_any_history_conserves_pages(size, history):
    pool, held, contents = PagePool(size), [], {}
    for operation, i in history:
        if operation == "issue" and i <= pool.free:
            held.append(pool.issue(i))
            contents |= dict.fromkeys(held[-1])  # overwritten
        elif operation == "name" and held:
            for place, page in enumerate(held[i % len(held)]):
                pool.name(page, name(place))
                if found(pool, *range(place + 1))[-1:] == [page]:
                    contents[page] = name(place)
        elif operation == "share":
            held.append(found(pool, *range(i)))
            pool.share(held[-1])
            assert [contents[page] for page in held[-1]] == [name(place) for place in range(len(held[-1]))]
        elif operation == "release" and held:
            pool.release(held.pop(i % len(held)))
        elif operation == "forget":
            pool.forget()
        owned = [page for pages in held for page in pages]
        assert pool.references == [owned.count(page) for page in range(size)]
        assert pool.free == size - len(set(owned))
