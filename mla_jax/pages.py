"""The pool of cache pages: who may write where. Plain Python, no arrays.

Page 0 is the null page: page tables are padded with it, and it is never given to a request.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mla_jax.checks import checked_size
from mla_jax.types import cdiv

__all__ = ["NULL_PAGE", "PageGroup", "PagePool"]

NULL_PAGE = 0
"""The page that pads page tables."""


class PagePool:
    """Pages ``1 … num_pages - 1``. The caller asks ``free`` before it asks for pages."""

    def __init__(self, num_pages: int):
        allowed = "2 or more (page 0 is never given), below 2**31"
        self.capacity = checked_size("PagePool: num_pages", num_pages, low=2, allowed=allowed) - 1
        self.peak = 0
        self.reset()

    def reset(self) -> None:
        """Take every page back, held or not."""
        # Last in, first out: a page that was just freed is the likeliest to be in a cache.
        self._returned: list[int] = []
        self._fresh = NULL_PAGE + 1  # this page and those above were never given
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can be given now."""
        return self.capacity - self.used

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return len(self._used)

    def alloc(self, n: int) -> list[int]:
        """Give ``n`` distinct pages."""
        assert 0 <= n <= self.free, f"PagePool: alloc({n}) with {self.free} free pages"
        again = min(n, len(self._returned))
        pages = [self._returned.pop() for _ in range(again)]
        pages += range(self._fresh, self._fresh + n - again)
        self._fresh += n - again
        self._used.update(pages)
        self.peak = max(self.peak, self.used)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back; each must be one that was given and not yet taken back."""
        for page in pages:
            assert page in self._used, f"PagePool: release of page {page}, which no request holds"
            self._used.remove(page)
            self._returned.append(page)


@dataclass(frozen=True, kw_only=True)
class PageGroup:
    """The pages of one cache group: a request holds pages of every group."""

    name: str
    pool: PagePool
    tokens: int  # that one page covers
    window: int | None = None  # tokens that a query sees, itself among them; None: all of them

    def __post_init__(self):
        checked_size(f"PageGroup {self.name}: tokens", self.tokens)
        if self.window is not None:
            checked_size(f"PageGroup {self.name}: window", self.window)

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens of one request take; of a window, before any is returned."""
        return cdiv(tokens, self.tokens)

    def missing(self, held: int, tokens: int, soon: int) -> int:
        """Pages that a request holding ``held`` lacks for ``tokens``; of a window for ``soon``."""
        return self.pages_of(tokens if self.window is None else soon) - held

    def unseen(self, computed: int) -> int:
        """Leading pages that no query sees once ``computed`` tokens are in the cache."""
        return 0 if self.window is None else max(computed + 1 - self.window, 0) // self.tokens

    def least(self, tokens: int) -> int:
        """Pages without which a request of so many tokens cannot be served, even alone."""
        pages = self.pages_of(tokens)
        if self.window is None:
            return pages
        return min(pages, cdiv(self.window - 1, self.tokens) + 2)  # one cut at each end
