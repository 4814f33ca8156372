import pytest

from mla_jax.errors import EngineError
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
def test_release_of_a_page_that_nobody_holds_is_a_bug(page):
    pool = PagePool(4)
    pool.release([3] if pool.alloc(1) == [3] else [])
    with pytest.raises(AssertionError, match=f"page {page}, which nobody holds"):
        pool.release([page])


def test_double_release_is_a_bug():
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release(pages)


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_page_to_give_is_refused(num_pages):
    with pytest.raises(EngineError, match="2 or more"):
        PagePool(num_pages)
