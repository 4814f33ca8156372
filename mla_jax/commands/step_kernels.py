"""One kernel of a step: its bytes, its products, its floor. And the kernels that all families have.

``roofline`` has the formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mla_jax.config_v4 import AnyConfig
from mla_jax.model.family import Serving, family_of
from mla_jax.pallas.device import Peaks

__all__ = ["Case", "Kernel", "Measured", "Phase", "Step", "closing", "opening", "product", "routed",
           "swiglu"]  # fmt: skip

REACHED_BANDWIDTH, REACHED_FLOPS = 4.25 / 4.8, 800 / 989
"""Shares of an H200's peaks that bound the tables of docs/performance.md."""

SCALE_BLOCK = 128 * 128  # elements of one float32 scale of e4m3 weights
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is asked to do."""

    config: AnyConfig
    phase: Phase
    batch: int  # requests
    context: int  # decode: cached rows of each request; prefill: new tokens of each
    weights: str = "bf16"  # bf16 or fp8 (block-scaled e4m3)
    cache: str = "bf16"  # a key of ELEMENT_FORMATS

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.batch * (1 if self.phase == "decode" else self.context)

    def row_bytes(self, group: str) -> float:
        """Bytes of one row in one layer of a cache group."""
        serving = Serving.of(self.config, cache_format=self.cache)
        groups = family_of(self.config.family).groups(self.config, serving)
        found = next(g for g in groups if g.name == group)
        return found.page_bytes / (found.page * found.layers)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A time from a table, scaled from its row to this problem by the floors of both."""

    us: float
    row: str  # which row of which table


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a step; bytes and FLOPs are of one call."""

    name: str
    calls: int  # layers that have it
    weights: float = 0.0  # bytes
    cache: float = 0.0  # bytes
    activations: float = 0.0  # bytes
    flops: float = 0.0
    measured: Measured | None = None

    @property
    def bytes(self) -> float:
        return self.weights + self.cache + self.activations

    def floor_us(self, peaks: Peaks) -> float:
        """Of one call."""
        return 1e6 * max(self.bytes / peaks.bandwidth, self.flops / peaks.flops)

    def predicted_us(self, peaks: Peaks) -> float:
        """Of one call, at the shares of the peaks that kernels reach."""
        memory = self.bytes / (REACHED_BANDWIDTH * peaks.bandwidth)
        return 1e6 * max(memory, self.flops / (REACHED_FLOPS * peaks.flops))

    def us(self, peaks: Peaks) -> float:
        """Measured where a row is near, else predicted; of one call."""
        return self.measured.us if self.measured else self.predicted_us(peaks)

    def bound(self, peaks: Peaks) -> str:
        """What the floor is made of."""
        return "memory" if self.bytes / peaks.bandwidth >= self.flops / peaks.flops else "products"


Case = dict[str, Any] | None
"""Sizes by which a measured row is looked up; None where nothing was ever measured."""


def opening(step: Step) -> Iterator[tuple[Kernel, Case]]:
    """Embedding, and the norms of all layers."""
    wide = 4 * step.tokens * step.config.hidden
    yield Kernel(name="embedding", calls=1, activations=wide), None
    yield Kernel(name="norms", calls=2 * step.config.layers + 1, activations=wide), None


def closing(step: Step) -> Iterator[tuple[Kernel, Case]]:
    """Logits of each request's last token, and the draw."""
    c, rows = step.config, step.batch
    yield (
        Kernel(
            name="head",
            calls=1,
            weights=2 * c.vocab * c.hidden,
            activations=rows * (2 * c.hidden + 4 * c.vocab),
            flops=2 * rows * c.vocab * c.hidden,
        ),
        None,
    )
    yield Kernel(name="sampling", calls=1, activations=4 * rows * c.vocab), None


def product(step: Step, name: str, calls: int, into: int, out: int, **facts: Any) -> Kernel:
    """``T`` rows times a matrix; ``w`` overrides the bytes of a weight."""
    each = facts.get("w") or (1 + 4 / SCALE_BLOCK if step.weights == "fp8" else 2)
    return Kernel(
        name=name,
        calls=calls,
        weights=into * out * each,
        activations=2 * step.tokens * (into + out),
        flops=2 * step.tokens * into * out,
    )


def swiglu(step: Step, name: str, calls: int, width: int) -> Kernel:
    one = product(step, name, calls, step.config.hidden, width)
    return Kernel(
        name=name,
        calls=calls,
        weights=3 * one.weights,
        activations=2 * step.tokens * (2 * step.config.hidden + 2 * width),
        flops=3 * one.flops,
    )


def routed(step: Step, layers: int) -> Iterator[tuple[Kernel, Case]]:
    """Router, routed experts and shared experts of so many layers."""
    c, moe, tokens = step.config, step.config.moe, step.tokens
    assert moe is not None  # these layers route
    yield product(step, "router", layers, c.hidden, moe.experts, w=4), None
    reached = moe.experts * (1 - (1 - moe.topk / moe.experts) ** tokens)
    each = 3 * c.hidden * moe.width
    a_weight = 1 + 4 / SCALE_BLOCK if step.weights == "fp8" else 2
    experts = Kernel(
        name="routed experts",
        calls=layers,
        weights=reached * each * a_weight,
        activations=2 * tokens * (2 * c.hidden + 2 * moe.topk * moe.width),
        flops=2 * tokens * moe.topk * each,
    )
    yield experts, {"table": "experts"}
    if moe.shared:
        yield swiglu(step, "shared experts", layers, moe.shared * moe.width), None
