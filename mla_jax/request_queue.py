"""Things in order, of which any one can leave at once. Plain Python."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Literal

__all__ = ["Queue"]


class Queue[T: Hashable]:
    """A double-ended queue of distinct things; every method takes the same time, however long.

    Taking one out of the middle of a list or a deque takes time proportional to its length.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def __contains__(self, item: T) -> bool:
        return item in self._order

    def __getitem__(self, end: Literal[0, -1]) -> T:
        """The first or the last."""
        assert end in (0, -1), f"Queue: [{end}]; only the ends are known by number"
        if not self._order:
            raise IndexError("Queue is empty")
        return next(iter(self._order) if end == 0 else reversed(self._order))

    def append(self, item: T) -> None:
        assert item not in self._order, f"Queue: {item!r} is in it already"
        self._order[item] = None

    def appendleft(self, item: T) -> None:
        self.append(item)
        self._order.move_to_end(item, last=False)

    def popleft(self) -> T:
        return self._order.popitem(last=False)[0]

    def remove(self, item: T) -> None:
        del self._order[item]
