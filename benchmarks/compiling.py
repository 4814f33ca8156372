"""Steps compiled with other options of XLA, for as long as a trial lasts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mla_jax.model import step

__all__ = ["gpu_options"]

_FURTHER = "UNROLLED", "IN_PLACE", "IN_KERNELS"


@contextmanager
def gpu_options(more: Mapping[str, Any]) -> Iterator[None]:
    """Within it every step has these options too; they replace those of the same names."""
    kept = {name: getattr(step, name) for name in ("GPU_OPTIONS", *_FURTHER)}
    step.GPU_OPTIONS = kept["GPU_OPTIONS"] | dict(more)
    for name in _FURTHER:
        setattr(step, name, {k: more.get(k, value) for k, value in kept[name].items()})
    try:
        yield
    finally:
        for name, options in kept.items():
            setattr(step, name, options)
