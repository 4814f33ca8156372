"""``python -m benchmarks.tune RESULTS``: packaged tunings from measured rows of ``decode``.

Measure with ``python -m benchmarks.run decode --cases $(python -m benchmarks.tune --cases)``; the
fastest row of each case by back-to-back time is kept, with the times of the others.
"""

import argparse
import dataclasses
import json
import re
from pathlib import Path

from benchmarks import decode
from mla_jax.pallas.dense_decode import mosaic
from mla_jax.pallas.tuning import folder_name

__all__ = ["main"]

ROOT = Path(__file__).parent.parent / "mla_jax" / "pallas" / "tuned"
CHOICES = tuple(
    f"/defer={defer}/prefetch={prefetch}/early_launch={early}"
    for defer, prefetch in ((0, 0), (1, 0), (1, 1))
    for early in (0, 1)
)
EXACT, NEAR = ("cache", "heads", "max_query_len", "page"), ("tokens", "width")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="JSON files of benchmarks.run decode")
    parser.add_argument("--cases", action="store_true", help="print what to measure")
    given = parser.parse_args()
    if given.cases:
        print(*(f"{c.name}{choice}" for c in decode.CASES for choice in CHOICES))
        return
    records = [json.loads(path.read_text()) for path in given.results]
    rows = [row for record in records for row in record["rows"]]
    first = records[0]
    path = ROOT / folder_name(first["device"]) / "dense_decode.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    date = max(re.findall(r"\d{4}-\d\d-\d\d", " ".join(map(str, given.results))), default="")
    table = {
        "measured": f"{first['device']}, {versions}, {date}: back to back, random-normal bf16",
        "exact": EXACT,
        "near": NEAR,
        "records": _records(rows),
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(path)


def _records(rows: list[dict]) -> list[dict]:
    """The fastest tuning of each case; batch-invariant rows are not a matter of speed."""
    best = []
    for case in decode.CASES:
        times = {
            decode.tuning_of(decode.find(row["case"])): round(row["ours_slope_us"], 1)
            for row in rows
            if row["case"].split("/")[0] == case.name
        }
        if not times:
            continue
        found = min(times, key=lambda tuning: times[tuning])
        others = {_text(t): us for t, us in times.items() if t != found}
        best.append(
            {
                "features": {
                    "cache": case.format,
                    "heads": case.heads,
                    "max_query_len": case.queries,
                    "page": decode.PAGE,
                    "tokens": case.batch * case.queries,
                    "width": -(-max(case.lens) // decode.PAGE),
                },
                "tuning": dataclasses.asdict(found),
                "us": times[found],
                "others": others,
            }
        )
    return best


def _text(tuning: mosaic.Tuning) -> str:
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(tuning).items())


if __name__ == "__main__":
    main()
