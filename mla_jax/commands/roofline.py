"""What a step must move and multiply, kernel by kernel, and how long that takes at least.

For a product of ``T`` tokens with a matrix ``in x out``, activations of ``a`` bytes and weights of
``w`` bytes an element::

    bytes = in out w + T (in + out) a              FLOPs = 2 T in out

Attention of a decode step, each of ``T`` requests over ``n`` cached rows of ``row`` bytes, ``H``
heads, latents of ``r`` and rotary keys of ``dr``::

    bytes = T n row + T H (2 r + dr) a             FLOPs = 2 T H n (2 r + dr)

Attention of a prefill, ``T`` tokens in sequences of ``n``, causal, expanded heads of
``d = dn + dr`` for queries and ``dv`` for values::

    bytes = T (H (d + dn + 2 dv) + dr) a           FLOPs = T (n + 1) H (d + dv)

Routed experts read those that any token chooses; of ``E`` experts, ``k`` chosen evenly by each of
``T`` tokens, that is ``E (1 - (1 - k / E)^T)`` on average. ``step_kernels_v4`` has what DeepSeek V4
does otherwise. The floor of a kernel is the larger of
``bytes / bandwidth`` and ``FLOPs / peak`` of the device's data sheet, in microseconds. A kernel
without a measured row is predicted at the share of both peaks that kernels of this library reach on
an H200: 4.25 of 4.8 TB/s and 800 of 989 TFLOP/s. Launches and gaps between kernels are not counted.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mla_jax.checks import checked_size
from mla_jax.commands.step_kernels import (
    Case,
    Kernel,
    Measured,
    Phase,
    Step,
    closing,
    opening,
    product,
    routed,
    swiglu,
)
from mla_jax.commands.step_kernels_v4 import layers_v4
from mla_jax.config import ModelConfig
from mla_jax.config_v4 import AnyConfig, V4Config
from mla_jax.errors import ArgumentError
from mla_jax.pallas.device import DeviceInfo, Peaks, peaks_of
from mla_jax.pallas.registry import Problem
from mla_jax.pallas.tuning import folder_name, lookup

__all__ = ["Kernel", "Measured", "Roofline", "Step", "roofline"]


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """All kernels of a step on a device."""

    step: Step
    peaks: Peaks
    kernels: tuple[Kernel, ...]

    @property
    def floor_us(self) -> float:
        return sum(k.calls * k.floor_us(self.peaks) for k in self.kernels)

    @property
    def us(self) -> float:
        """Sum of measured and predicted times."""
        return sum(k.calls * k.us(self.peaks) for k in self.kernels)

    def total(self, what: Literal["weights", "cache", "activations", "bytes", "flops"]) -> float:
        """Of all calls of all kernels."""
        return sum(k.calls * getattr(k, what) for k in self.kernels)


def roofline(
    config: AnyConfig,
    *,
    device: str = "H200",
    phase: Phase = "decode",
    batch: int = 1,
    context: int = 4096,
    weights: Literal["bf16", "fp8"] = "bf16",
    cache: str = "bf16",
    results: Path | None = None,
) -> Roofline:
    """The kernels of one step of ``batch`` requests.

    Args:
        device: a key of ``pallas.device.PEAKS``.
        context: decode: cached tokens of each request; prefill: new tokens of each.
        weights: of the layers' products; the router is float32, embedding and head are bf16.
        cache: how a token is stored, of ``cache.ELEMENT_FORMATS``.
        results: a folder of measured tables, ``benchmarks/results`` of a checkout.

    Raises:
        ArgumentError: no such device, or no folder of results.
        EngineError: a size below 1, or a cache format that is none or cannot hold the widths.
    """
    checked_size("batch", batch)
    checked_size("context", context)
    if results is not None and not results.is_dir():
        raise ArgumentError(
            "results", results, "a folder, such as benchmarks/results of a checkout"
        )
    step = Step(
        config=config, phase=phase, batch=batch, context=context, weights=weights, cache=cache
    )
    peaks = peaks_of(device)
    tables = _Tables(folder=results, kind=peaks.kind)
    kernels = []
    for kernel, case in _kernels(step):
        found = tables.find(step, kernel, case, peaks) if case else None
        kernels.append(kernel if found is None else replace(kernel, measured=found))
    return Roofline(step=step, peaks=peaks, kernels=tuple(kernels))


def _kernels(step: Step) -> Iterator[tuple[Kernel, Case]]:
    yield from opening(step)
    if isinstance(step.config, V4Config):
        yield from layers_v4(step, step.config)
    else:
        yield from _attention(step, step.config)
        if step.config.indexer is not None:
            yield from _indexer(step, step.config)
        yield from _feed_forward(step, step.config)
    yield from closing(step)


def _batched(step: Step, name: str, heads: int, into: int, out: int) -> Kernel:
    """A product of each head's own matrix; these weights are derived, always bf16."""
    return Kernel(
        name=name,
        calls=step.config.layers,
        weights=2 * heads * into * out,
        activations=2 * step.tokens * heads * (into + out),
        flops=2 * step.tokens * heads * into * out,
    )


def _attention(step: Step, c: ModelConfig) -> Iterator[tuple[Kernel, Case]]:
    d, tokens, n = c.dims, step.tokens, c.layers
    if d.q_rank is None:
        yield product(step, "queries", n, c.hidden, d.heads * d.qk), None
    else:
        yield product(step, "query latent", n, c.hidden, d.q_rank), None
        yield product(step, "queries", n, d.q_rank, d.heads * d.qk), None
    yield product(step, "latent and key", n, c.hidden, d.row), None
    row = step.row_bytes("latent")
    made = 2 * tokens * (d.row + 2 * d.heads * d.rope)
    yield Kernel(name="rotate and write", calls=n, cache=tokens * row, activations=made), None
    if step.phase == "prefill" and c.indexer is None:
        yield product(step, "expand latents", n, d.rank, d.heads * (d.nope + d.v)), None
        wide = d.heads * (d.qk + d.nope + 2 * d.v) + d.rope
        yield (
            Kernel(
                name="attention",
                calls=n,
                activations=2 * tokens * wide,
                flops=tokens * (step.context + 1) * d.heads * (d.qk + d.v),
            ),
            {"table": "prefill"},
        )
    else:
        yield _batched(step, "absorb queries", d.heads, d.nope, d.rank), None
        yield _over_rows(step, c, row)
        yield _batched(step, "values", d.heads, d.rank, d.v), None
    yield product(step, "output", n, d.heads * d.v, c.hidden), None


def _over_rows(step: Step, c: ModelConfig, row: float) -> tuple[Kernel, Case]:
    """Absorbed attention over cached rows, all of them or those an indexer selected."""
    d, indexer, tokens = c.dims, c.indexer, step.tokens
    most = step.context if indexer is None else min(step.context, indexer.topk)
    if step.phase == "decode":
        pairs, rows = tokens * most, tokens * most
    else:  # token t of a sequence sees min(t, topk) rows; each row is read once at least
        short = min(step.context, most)
        seen = short * (short + 1) // 2 + (step.context - short) * most
        pairs, rows = step.batch * seen, tokens
    width = 2 * d.rank + d.rope
    kernel = Kernel(
        name="attention" if indexer is None else "sparse attention",
        calls=step.config.layers,
        cache=rows * row,
        activations=2 * tokens * d.heads * width,
        flops=2 * pairs * d.heads * width,
    )
    return kernel, {"table": "decode" if indexer is None else "sparse_decode"}


def _indexer(step: Step, c: ModelConfig) -> Iterator[tuple[Kernel, Case]]:
    tokens = step.tokens
    indexer, q_rank = c.indexer, c.dims.q_rank
    assert indexer is not None and q_rank is not None  # as ModelConfig checks
    layers, wide = sum(indexer.full), indexer.heads * indexer.dim
    yield product(step, "index queries", layers, q_rank, wide), None
    yield product(step, "index keys", layers, c.hidden, indexer.dim), None
    yield product(step, "index head weights", layers, c.hidden, indexer.heads, w=4), None
    row = step.row_bytes("index_keys")
    decode = step.phase == "decode"
    pairs = tokens * (step.context if decode else (step.context + 1) / 2)
    rows = tokens * (step.context if decode else 1)
    kernel = Kernel(
        name="select top-k",
        calls=layers,
        cache=(rows + tokens) * row,  # what is read, and the new keys written
        activations=2 * tokens * (wide + indexer.heads) + 4 * tokens * indexer.topk,
        flops=2 * pairs * wide,
    )
    yield kernel, {"table": "indexer"}


def _feed_forward(step: Step, c: ModelConfig) -> Iterator[tuple[Kernel, Case]]:
    sparse = sum(c.sparse_layers)
    if sparse < c.layers:
        yield swiglu(step, "dense feed-forward", c.layers - sparse, c.mlp), None
    if c.moe is not None:
        yield from routed(step, sparse)


# ---------------------------------------------------------------------------- measured rows

_REACH = 2.0  # a row may be this far away, as a factor, in each size
_ROWS = {
    "decode": re.compile(r"b(?P<batch>\d+)_q1_h(?P<heads>\d+)_k(?P<context>\d+)(?P<cache>_fp8.*)?"),
    "prefill": re.compile(r"h(?P<heads>\d+)_q(?P<batch>\d+)x(?P<context>\d+)_causal"),
    "sparse_decode": re.compile(r"b(?P<batch>\d+)_q1_h(?P<heads>\d+)_ds_mla"),
    "indexer": re.compile(r"decode_(?P<batch>\d+)x(?P<context>\d+)"),
}
"""How the cases of a table are named."""


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """Measured rows of one kind of device: packaged tunings, and tables of a folder."""

    folder: Path | None
    kind: str

    def find(self, step: Step, kernel: Kernel, case: dict[str, Any], peaks: Peaks):
        """The nearest row's time, scaled; None: no row is near enough."""
        if case["table"] == "experts":
            return self._experts(step)
        if self.folder is None:
            return None
        return self._row(step, kernel, case["table"], peaks)

    def _experts(self, step: Step) -> Measured | None:
        c, moe = step.config, step.config.moe
        assert moe is not None  # the step routes
        if step.weights != "bf16":
            return None
        sizes = {"experts": moe.experts, "topk": moe.topk, "hidden": c.hidden, "width": moe.width}
        problem = Problem.of("routed_experts", dtype="bfloat16", tokens=step.tokens, **sizes)
        found = lookup(problem, DeviceInfo(platform="gpu", kind=self.kind))
        if found is None:
            return None
        record, _ = found
        tokens = record.features["tokens"]
        mine, row = (_experts_us(step, t) for t in (step.tokens, tokens))
        return Measured(us=record.us * mine / row, row=f"routed_experts, {tokens} tokens")

    def _row(self, step: Step, kernel: Kernel, table: str, peaks: Peaks) -> Measured | None:
        best: tuple[float, Measured] | None = None
        for name, case, us in self._rows(table):
            other = _of_case(step, table, case)
            if other is None:
                continue
            far = max(_factor(other.batch, step.batch), _factor(other.context, step.context))
            if far > _REACH or (best is not None and far >= best[0]):
                continue
            twin = next(k for k, c in _kernels(other) if c and c["table"] == table)
            scaled = us * kernel.floor_us(peaks) / twin.floor_us(peaks)
            best = far, Measured(us=scaled, row=f"{table}, {name}")
        return None if best is None else best[1]

    def _rows(self, table: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, sizes and microseconds of each row of the newest table that has a size."""
        assert self.folder is not None
        pattern = re.compile(rf"{re.escape(folder_name(self.kind))}_{table}_[0-9-]+\.json")
        files = sorted(p for p in self.folder.glob("*.json") if pattern.fullmatch(p.name))
        for row in json.loads(files[-1].read_text())["rows"] if files else ():
            match = _ROWS[table].fullmatch(row["case"])
            if match:
                sizes = {k: v for k, v in match.groupdict().items() if v is not None}
                yield row["case"], sizes, row.get("ours_us", row.get("us"))


def _of_case(step: Step, table: str, case: dict[str, str]) -> Step | None:
    """The step that a row measured, if it is this model's kernel at another size."""
    c = step.config
    assert isinstance(c, ModelConfig)  # no table has rows of V4
    widths = c.dims.rank, c.dims.rope, c.dims.nope, c.dims.v
    if "heads" in case and int(case["heads"]) != c.dims.heads:
        return None
    if table == "prefill" and widths[1:] != (64, 128, 128):
        return None
    if table in ("decode", "sparse_decode") and widths[:2] != (512, 64):
        return None
    indexer = c.indexer
    of_v32 = indexer is not None and (indexer.heads, indexer.dim, indexer.topk) == (64, 128, 2048)
    if table in ("sparse_decode", "indexer") and not (of_v32 and step.phase == "decode"):
        return None
    stored = {"decode": "fp8_e4m3" if "cache" in case else "bf16"}
    stored |= {"sparse_decode": "fp8_e4m3", "indexer": "fp8_e4m3"}
    if step.cache != stored.get(table, step.cache):
        return None
    return Step(
        config=c,
        phase=step.phase,
        batch=int(case["batch"]),
        context=int(case.get("context", step.context)),
        weights=step.weights,
        cache=step.cache,
    )


def _experts_us(step: Step, tokens: int) -> float:
    """The floor of the routed experts of that many tokens, on an H200."""
    other = Step(config=step.config, phase="decode", batch=tokens, context=1)
    twin = next(k for k, _ in routed(other, 1) if k.name == "routed experts")
    return twin.floor_us(peaks_of("H200"))


def _factor(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
