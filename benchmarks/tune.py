"""``python -m benchmarks.tune RESULTS``: packaged tunings from measured rows of ``decode``.

Measure with ``python -m benchmarks.run decode --cases $(python -m benchmarks.tune --cases)``; the
fastest row of each case by back-to-back time is kept, with the times of the others. A case with one
candidate has no record: what nothing was compared with is the heuristic's.
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
    if not (best := _records(rows)):
        parser.error("no case with two measured tunings; measure what --cases prints")
    first = records[0]
    path = ROOT / folder_name(first["device"]) / "mla_decode.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    date = max(re.findall(r"\d{4}-\d\d-\d\d", " ".join(map(str, given.results))), default="")
    table = {
        "measured": f"{first['device']}, {versions}, {date}: back to back, random-normal bf16",
        "exact": EXACT,
        "near": NEAR,
        "records": best,
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(path)


def _records(rows: list[dict]) -> list[dict]:
    """The fastest tuning of each case that has several; workers are the device's, not tuned."""
    best = []
    for case in decode.CASES:
        times = {
            decode.tuning_of(decode.find(row["case"]), workers=1): round(row["ours_slope_us"], 1)
            for row in rows
            if row["case"].split("/")[0] == case.name
        }
        if len(times) < 2:
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
                "tuning": _fields(found),
                "us": times[found],
                "others": others,
            }
        )
    return best


def _fields(tuning: mosaic.Tuning) -> dict:
    return {k: v for k, v in dataclasses.asdict(tuning).items() if k != "workers"}


def _text(tuning: mosaic.Tuning) -> str:
    return " ".join(f"{k}={v}" for k, v in _fields(tuning).items())


if __name__ == "__main__":
    main()
