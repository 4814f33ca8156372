"""``python -m benchmarks.table`` writes docs/performance.md from the newest results."""

import functools
import json
import math
from pathlib import Path

__all__ = ["page"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

Written by `python -m benchmarks.table` from `benchmarks/results/`, newest first; do not edit.

A ratio is the peer's time over ours, both from one run: above 1.00 we are faster. *Sum* adds up
the kernels of an isolated call, where overlapping ones count twice; *span* is from the start of
the first to the end of the last. *Back to back* is what one more call takes in a row of many.
The floor is the larger of FLOPs / 800 TFLOP/s and bytes / 4.25 TB/s. Case names: requests,
queries of each, heads, keys of each (ragged: 1 to 16384).
"""

TRAFFIC = """Cache traffic is compared with a device-to-device copy that moves as many bytes, in the
same run. Case names: operation, format of the cache, megabytes of stored rows.
"""

TRAFFIC_COLUMNS = {  # heading: key, digits
    "span µs": ("ours_span_us", 1),
    "back to back µs": ("ours_slope_us", 1),
    "copy span": ("copy_span_us", 1),
    "copy back to back": ("copy_slope_us", 1),
    "torch span": ("peer_span_us", 1),
    "torch back to back": ("peer_slope_us", 1),
    "XLA span": ("xla_span_us", 1),
    "GB/s": ("gbs", 0),
    "% of copy": ("copy_percent", 1),
    "% of copy back to back": ("copy_percent_slope", 1),
    "ratio to torch": ("ratio_span", 2),
    "back to back": ("ratio_slope", 2),
}

PREFILL = """Prefill is compared with FlashAttention-3: its kernels alone, and with the
concatenation of the keys that it must be given (`concat`). Case names: heads, requests x queries
of each (ragged: 1000, 3000, 17, 4500), causal, or keys and full.
"""

PREFILL_COLUMNS = {
    "sum µs": ("ours_us", 0),
    "span µs": ("ours_span_us", 0),
    "back to back µs": ("ours_slope_us", 0),
    "peer sum": ("peer_us", 0),
    "peer span": ("peer_span_us", 0),
    "peer back to back": ("peer_slope_us", 0),
    "ratio sum": ("ratio", 2),
    "ratio span": ("ratio_span", 2),
    "ratio back to back": ("ratio_slope", 2),
    "concat sum": ("ratio_concat", 2),
    "concat span": ("ratio_concat_span", 2),
    "concat back to back": ("ratio_concat_slope", 2),
    "TFLOP/s": ("tflops", 0),
    "% of floor": ("floor_percent", 0),
}

COLUMNS = (
    "case", "sum µs", "span µs", "back to back µs", "peer sum", "peer span", "peer back to back",
    "ratio sum", "ratio span", "ratio back to back", "TFLOP/s", "GB/s", "% of floor", "error",
)  # fmt: skip


def page() -> str:
    """The text of docs/performance.md."""
    paths = sorted(RESULTS.glob("*.json"), reverse=True)
    return "\n".join([HEAD, *map(_section, paths)]).rstrip() + "\n"


def _section(path: Path) -> str:
    record = json.loads(path.read_text())
    rows = record["rows"]
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    traffic, prefill = "copy_percent" in rows[0], "ratio_concat" in rows[0]
    chosen = TRAFFIC_COLUMNS if traffic else PREFILL_COLUMNS if prefill else None
    columns = ("case", *chosen) if chosen else COLUMNS
    lines = [
        f"## {path.stem}",
        "",
        f"{record['device']}; {versions}; clocks {record['clocks']}. {record['method']}.",
        "",
        *([TRAFFIC] if traffic else [PREFILL] if prefill else []),
        *([record["note"], ""] if "note" in record else []),
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(_chosen(row, chosen) if chosen else _cells(row))} |" for row in rows),
        "",
    ]
    main = [r for r in rows if r["case"] not in record.get("extra", [])]
    for key in (f"ratio{side}{end}" for side in ("", "_concat") for end in ("", "_span", "_slope")):
        found = [r[key] for r in main if r.get(key, 0) > 0]
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            lines.append(f"- `{key}`: geometric mean {mean:.2f}, least {min(found):.2f}")
    return "\n".join([*lines, ""])


def _number(row: dict, key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if row.get(key, 0) > 0 else "–"


def _chosen(row: dict, columns: dict) -> list[str]:
    return [f"`{row['case']}`", *(_number(row, *x) for x in columns.values())]


def _cells(row: dict) -> list[str]:
    number = functools.partial(_number, row)
    times = ("ours_us", "ours_span_us", "ours_slope_us", "peer_us", "peer_span_us", "peer_slope_us")
    ratios = ("ratio", "ratio_span", "ratio_slope")
    return [
        f"`{row['case']}`",
        *(number(k, 1) for k in times),
        *(number(k, 2) for k in ratios),
        *(number(k, 0) for k in ("tflops", "gbs", "floor_percent")),
        f"{row['error']:.1e}",
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
