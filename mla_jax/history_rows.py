"""Which row of the token history a running request has. Plain Python."""

from collections.abc import Container, Hashable

__all__ = ["HistoryRows"]


class HistoryRows[T: Hashable]:
    """Lends rows to requests that ask for a penalty or a bias, while they run."""

    def __init__(self, rows: int):
        self._free = list(range(rows))
        self._lent: dict[T, int] = {}

    def of(self, request: T, running: Container[T]) -> int:
        """The request's row. Rows of requests that have ended are lent again."""
        if request not in self._lent and not self._free:
            for gone in [other for other in self._lent if other not in running]:
                self._free.append(self._lent.pop(gone))
        if request not in self._lent:
            self._lent[request] = self._free.pop()
        return self._lent[request]
