"""A progress bar for ``weights.load``, on stderr, with bytes per second."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from mla_jax.model.weights import Progress

__all__ = ["weights_bar"]


@contextmanager
def weights_bar(label: str = "weights") -> Iterator[Progress]:
    """Yields what ``load(progress=…)`` takes; the bar disappears from pipes and when done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
