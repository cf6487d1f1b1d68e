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
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3] and pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.allocate(1)
    pool.release(first)
    assert pool.num_free == 3 and pool.references == [int(page in second) for page in range(4)]
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(first)


def test_a_released_page_keeps_its_hash_until_it_is_issued():
    pool = PagePool(2)
    page = pool.allocate(1)[0]
    pool.cache_page(page, name(0))
    pool.release([page])
    assert found(pool, 0) == [page] and pool.count_free([page]) == 1
    pool.allocate(2)
    assert found(pool, 0) == []


def test_a_shared_page_returns_with_its_last_owner():
    pool = PagePool(3)
    page = pool.allocate(1)[0]
    pool.cache_page(page, name(0))
    pool.share(found(pool, 0))
    pool.release([page])
    assert pool.num_free == 2 and pool.count_free([page]) == 0
    pool.release([page])
    assert pool.num_free == 3
    pool.share([page])
    assert pool.num_free == 2 and page not in pool.allocate(2)


def test_eviction_takes_unhashed_pages_then_the_least_recently_released():
    pool = PagePool(6)
    old, new, unnamed = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for i, page in enumerate(old + new):
        pool.cache_page(page, name(i))
    for pages in (old, new, unnamed):
        pool.release(pages)
    assert pool.allocate(6) == [*unnamed, *reversed(old), *reversed(new)]


def test_sharing_makes_a_page_most_recently_used():
    pool = PagePool(2)
    pages = pool.allocate(2)
    for i, page in enumerate(pages):
        pool.cache_page(page, name(i))
    pool.release(pages[:1])
    pool.release(pages[1:])
    pool.share(pages[:1])
    pool.release(pages[:1])
    assert pool.allocate(1) == pages[1:]


def test_the_first_page_of_a_hash_keeps_it():
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.cache_page(first, name(0))
    pool.cache_page(second, name(0))
    pool.cache_page(first, name(1))
    assert found(pool, 0) == [first] and found(pool, 1) == []
    pool.release([first, second])
    assert pool.allocate(1) == [second]  # it has no name


def test_removed_hashes_are_not_found_and_pages_keep_owners():
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.cache_page(pages[0], name(0))
    pool.reset_prefix_cache()
    assert found(pool, 0) == [] and pool.num_free == 1
    pool.cache_page(pages[1], name(0))
    assert found(pool, 0) == pages[1:]


def test_hidden_pages_are_not_found_and_keep_their_owners():
    pool = PagePool(3)
    pool.evicted = []
    pages = pool.allocate(2)
    for i, page in enumerate(pages):
        pool.cache_page(page, name(i))
    assert pool.drop_hash(pages[0]) == name(0) and pool.drop_hash(pages[0]) is None
    assert found(pool, 0) == [] and found(pool, 1) == pages[1:] and pool.num_free == 1
    pool.release(pages)
    assert pool.allocate(1) == pages[:1] and not pool.evicted  # it has no name, and is in no tier


OPERATIONS = st.tuples(
    st.sampled_from(["issue", "name", "share", "release", "release", "forget", "hide"]), st.integers(0, 7)
)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.integers(1, 6), st.lists(OPERATIONS, max_size=40))
def test_any_history_conserves_pages(size, history):
    pool, held, contents = PagePool(size), [], {}
    for operation, i in history:
        if operation == "issue" and i <= pool.num_free:
            held.append(pool.allocate(i))
            contents |= dict.fromkeys(held[-1])  # overwritten
        elif operation == "name" and held:
            for place, page in enumerate(held[i % len(held)]):
                pool.cache_page(page, name(place))
                if found(pool, *range(place + 1))[-1:] == [page]:
                    contents[page] = name(place)
        elif operation == "share":
            held.append(found(pool, *range(i)))
            pool.share(held[-1])
            assert [contents[page] for page in held[-1]] == [name(place) for place in range(len(held[-1]))]
        elif operation == "release" and held:
            pool.release(held.pop(i % len(held)))
        elif operation == "forget":
            pool.reset_prefix_cache()
        elif operation == "hide" and held:
            for page in held[i % len(held)]:
                pool.drop_hash(page)
        owned = [page for pages in held for page in pages]
        assert pool.references == [owned.count(page) for page in range(size)]
        assert pool.num_free == size - len(set(owned))
