"""``python -m benchmarks.table`` writes docs/performance.md from the newest results."""

import json
import math
from pathlib import Path

__all__ = ["page"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

Written by `python -m benchmarks.table` from `benchmarks/results/`; do not edit.

A ratio is the peer's time over ours, both from one run: above 1.00 we are faster. *Isolated* is
one call alone, from the start of its first kernel to the end of its last (*sum*: its kernels'
times added up, where overlapping kernels count twice). *Back to back* is what one more call
takes in a row of many. The floor is the larger of FLOPs / 800 TFLOP/s and bytes / 4.25 TB/s.
"""

COLUMNS = (
    "case", "isolated µs", "back to back µs", "peer isolated µs", "peer back to back µs",
    "ratio sum", "ratio isolated", "ratio back to back", "TFLOP/s", "GB/s", "% of floor", "error",
)  # fmt: skip


def page() -> str:
    """The text of docs/performance.md."""
    newest: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda p: p.stem.rsplit("_", 1)[1]):
        newest[path.stem.rsplit("_", 1)[0]] = path
    return "\n".join([HEAD, *(_section(newest[key]) for key in sorted(newest))])


def _section(path: Path) -> str:
    record = json.loads(path.read_text())
    rows = record["rows"]
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    lines = [
        f"## {path.stem}",
        "",
        f"{record['device']}; {versions}; clocks {record['clocks']}. {record['method']}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
        "",
    ]
    main = [r for r in rows if r["case"] not in record.get("extra", [])]
    for key in ("ratio", "ratio_span", "ratio_slope"):
        found = [r[key] for r in main if r[key] > 0]
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            lines.append(f"- `{key}`: geometric mean {mean:.2f}, least {min(found):.2f}")
    return "\n".join([*lines, ""])


def _cells(row: dict) -> list[str]:
    times = ("ours_span_us", "ours_slope_us", "peer_span_us", "peer_slope_us")
    ratios = ("ratio", "ratio_span", "ratio_slope")
    return [
        f"`{row['case']}`",
        *(f"{row[k]:.1f}" for k in times),
        *(f"{row[k]:.2f}" for k in ratios),
        *(f"{row[k]:.0f}" for k in ("tflops", "gbs", "floor_percent")),
        f"{row['error']:.1e}",
    ]


if __name__ == "__main__":
    PAGE.write_text(page())
