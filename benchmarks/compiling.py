"""Steps compiled with other options of XLA, for as long as a trial lasts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mla_jax.model import step

__all__ = ["gpu_options"]


@contextmanager
def gpu_options(more: Mapping[str, Any]) -> Iterator[None]:
    """Within it ``step.GPU_OPTIONS`` has these too; they replace those of the same names."""
    kept = step.GPU_OPTIONS
    step.GPU_OPTIONS = kept | dict(more)
    try:
        yield
    finally:
        step.GPU_OPTIONS = kept
