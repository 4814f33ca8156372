"""Rows of suites that time whole paths rather than one kernel: ours and one peer, same arrays."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.timing import Isolated, back_to_back_us, isolated_us

__all__ = ["Peer", "checked", "line", "row"]

TOLERANCE = 2e-2  # relative, of bf16 results against float32
FLOPS, BYTES = 800e12, 4.25e12  # ceilings of the floor: bf16 product, copy


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``once`` waits, ``many(n)`` waits at the end."""

    name: str
    once: Callable[[], None]
    many: Callable[[int], None]


def checked(name: str, error: float, peer: Peer) -> Peer | None:
    """A peer whose result is wrong is none."""
    if error < TOLERANCE:
        return peer
    print(f"{name}: {peer.name} is off by {error}", flush=True)
    return None


def row(
    name: str,
    once: Callable[[], None],
    many: Callable[[int], None],
    peer: Peer | None,
    *,
    calls: int,
    flops: float,
    bytes: float,
    error: float,
    **more: object,
) -> dict:
    """Time both sides, interleaved; ``calls`` of ``many`` make one step of the slope."""
    onces, manys = {"ours": once}, {"ours": lambda n: many(n * calls)}
    if peer is not None:
        onces["peer"], manys["peer"] = peer.once, lambda n: peer.many(n * calls)
    isolated = isolated_us(onces)
    slopes = back_to_back_us(manys, dict.fromkeys(manys, calls))
    none = Isolated(sum=math.nan, span=math.nan, kernels={})
    ours, theirs = isolated["ours"], isolated.get("peer", none)
    slope = slopes.get("peer", math.nan)
    floor = max(flops / FLOPS, bytes / BYTES) * 1e6
    return {
        "case": name,
        "ours_us": ours.sum,
        "ours_span_us": ours.span,
        "ours_slope_us": slopes["ours"],
        "peer": peer.name if peer else None,
        "peer_us": theirs.sum,
        "peer_span_us": theirs.span,
        "peer_slope_us": slope,
        "ratio": theirs.sum / ours.sum,
        "ratio_span": theirs.span / ours.span,
        "ratio_slope": slope / slopes["ours"],
        "tflops": flops / ours.span / 1e6,
        "gbs": bytes / ours.span / 1e3,
        "floor_us": floor,
        "floor_percent": 100 * floor / ours.span,
        "error": error,
        "kernels": {k: found.kernels for k, found in isolated.items()},
        **more,
    }


def line(row: dict) -> str:
    """One row of the table, and the longest kernels of both sides."""
    times = (
        row[f"{who}_{what}"] for who in ("ours", "peer") for what in ("us", "span_us", "slope_us")
    )
    ratios = (row[k] for k in ("ratio", "ratio_span", "ratio_slope"))
    text = (
        f"{row['case']:28s} {' '.join(f'{x:8.1f}' for x in times)} | "
        f"{' '.join(f'{x:.2f}' for x in ratios)} | {row['tflops']:.0f} TFLOP/s "
        f"{row['floor_percent']:.0f}% err {row['error']:.1e}"
    )
    for who, kernels in row["kernels"].items():
        top = sorted(kernels.items(), key=lambda k: -k[1])[:8]
        text += f"\n    {who}: " + "; ".join(f"{k[:34]} {us:.0f}" for k, us in top)
    return text
