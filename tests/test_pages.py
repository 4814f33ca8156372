import tracemalloc

import pytest

from mla_jax.errors import EngineError, shown
from mla_jax.pages import NULL_PAGE, PagePool


def test_gives_every_page_but_the_null_page():
    pool = PagePool(5)
    assert sorted(pool.alloc(pool.free)) == [1, 2, 3, 4]
    assert NULL_PAGE == 0
    assert (pool.free, pool.used, pool.peak) == (0, 4, 4)


def test_released_pages_are_given_again_and_the_peak_stays():
    pool = PagePool(4)
    first = pool.alloc(3)
    pool.release(first[:2])
    assert (pool.free, pool.used, pool.peak) == (2, 1, 3)
    assert sorted(pool.alloc(2)) == sorted(first[:2])


def test_alloc_of_nothing_and_release_of_nothing():
    pool = PagePool(2)
    assert pool.alloc(0) == []
    pool.release([])
    assert pool.used == 0


@pytest.mark.parametrize("n", [-1, 4])
def test_more_than_is_free_is_a_bug_of_the_caller(n):
    with pytest.raises(AssertionError, match=rf"alloc\({n}\) with 3 free pages"):
        PagePool(4).alloc(n)


@pytest.mark.parametrize("page", [0, 3, 99])
def test_release_of_a_page_that_no_request_holds_is_a_bug(page):
    pool = PagePool(4)
    pool.release([3] if pool.alloc(1) == [3] else [])
    with pytest.raises(AssertionError, match=f"page {page}, which no request holds"):
        pool.release([page])


def test_double_release_is_a_bug():
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="no request holds"):
        pool.release(pages)


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_page_to_give_is_refused(num_pages):
    with pytest.raises(EngineError, match="2 or more"):
        PagePool(num_pages)


@pytest.mark.parametrize("num_pages", [2**31, 10**5000, 2.0, "9", None, True], ids=shown)
def test_what_is_no_number_of_pages_is_refused_before_a_list_is_built(num_pages):
    with pytest.raises(EngineError, match=r"num_pages: given .*below 2\*\*31"):
        PagePool(num_pages)


def test_a_pool_costs_what_was_given_not_what_could_be():
    tracemalloc.start()
    pool = PagePool(2**31 - 1)
    pool.release(pool.alloc(1000))
    assert (pool.free, pool.used, pool.peak) == (2**31 - 2, 0, 1000)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_freed_pages_come_first_the_last_one_first():
    pool = PagePool(10)
    assert pool.alloc(4) == [1, 2, 3, 4]
    pool.release([2, 4])
    assert pool.alloc(4) == [4, 2, 5, 6]
