"""Write what the documentation derives from the code: ``python -m tools.docs [--check]``.

The support matrix of README.md comes from the registry, docs/cache_formats.md from ``FORMATS``, the
counts of docs/testing.md from ``tests/faults``, the errors of docs/numerics.md from the newest file
of ``tools.numerics`` for each device; of other pages the definitions come from the code and the
tables of measurements from the newest JSON file of each suite.
"""

import ast
import functools
import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp

from mla_jax.formats import ELEMENT_FORMATS, RECORD_FORMATS, CacheFormat, Field, RecordFormat
from mla_jax.ops import support_matrix
from tools import faults

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RANK, ROPE = 512, 64
PAGES = (1, 2, 64, 256)


def between(page: str, what: str, text: str) -> str:
    """A page with ``text`` between its markers of ``what``."""
    begin, end = f"<!-- {what}: written by `make docs` -->", f"<!-- end of {what} -->"
    before, _, rest = (ROOT / page).read_text().partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def readme() -> str:
    """README.md with the current support matrix."""
    return between("README.md", "support matrix", support_matrix())


def testing() -> str:
    """docs/testing.md with the number of faults of each family."""
    return between("docs/testing.md", "seeded faults", faults.table(faults.faults()))


def numerics() -> str:
    """docs/numerics.md with the errors of the newest file of each device."""
    newest = {}
    for path in sorted(RESULTS.glob("*_numerics_*.json")):
        found = json.loads(path.read_text())
        newest[found["device"]] = found
    parts = [_errors(found) for _, found in sorted(newest.items(), reverse=True)]
    return between("docs/numerics.md", "measured errors", "\n\n".join(parts))


def _errors(found: dict) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    lines = [
        f"### On {found['device']}, {versions}, {found['date']}",
        "",
        "| operation | dtype | stored as | backend | largest | rms | largest, original | "
        "rms, original | lse |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        figures = (r[k] for k in ("largest", "rms", "original_largest", "original_rms", "lse"))
        shown = ("" if x is None else f"{x:.1e}" for x in figures)
        names = f"`{r['op']}` | {r['dtype']} | {r['stored']} | {r['backend']}"
        lines.append(f"| {names} | {' | '.join(shown)} |")
    return "\n".join(lines)


def cache_formats() -> str:
    """Every token record and page, byte by byte; elements at the widths of DeepSeek V3."""
    elements = "".join(_elements(f) for f in ELEMENT_FORMATS.values())
    records = "".join(_record(f) for f in RECORD_FORMATS.values())
    record = RECORD_FORMATS["ds_mla"]
    return f"""# Cache formats

A token has a slot, `page_id * page + offset`. Numbers are little-endian. Rows that no token was
written to hold anything and are never used.

This page is for those who read or write cache memory from other code. It is printed from
`mla_jax.formats.FORMATS` by `make docs`.

```python
from mla_jax.formats import FORMATS

records = FORMATS["ds_mla"]
print(records.row_bytes, records.page_bytes(64))  # {record.row_bytes} {record.page_bytes(64)}
```

## Limits

An e4m3 cache of elements has one scale for each layer; scales for groups of a token exist in byte
records only. Records have the published widths.

# Elements of one dtype

A `LatentCache` is `[pages, page, row]`, or `[layers, pages, page, row]`, contiguous: in its layer
a token starts at byte `slot * row_bytes`. A record is the latent after its norm, then the rotary
key after its rotation. Bytes are given for rank {RANK} and rope {ROPE}.
{elements}
# Byte records

A `RecordCache` is `[pages, page_bytes]`, or `[layers, pages, page_bytes]`, of uint8. A page of
`n` tokens is its planes, one behind the other; `t` is a token's offset in its page. Pages may end
with bytes that belong to no token; nothing writes or reads them.

Codes are `cast(clamp(float32(x) / s))` with the scale `s` of their group, a true division, rounded
to nearest even, and are read as `float32(code) * s`, rounded once to the dtype asked for. A NaN
stays NaN and takes no part in `amax`, the largest magnitude of its group; a group with an infinity
is read as NaN. No reader depends on how a writer chose its scales.
{records}"""


def _elements(f: CacheFormat) -> str:
    rule = (
        "Stored: `cast(clamp(float32(x) / scale, -448, 448))`, a true division, rounded to "
        "nearest even; NaN stays NaN. Read: `float32(element) * scale`, rounded once to the "
        "dtype asked for. One float32 `scale` for the whole cache, shared by both fields."
        if f.quantised
        else "Stored: `x` cast to the element dtype; of the same dtype, every bit is kept."
    )
    text = f"\n## `{f.name}`: {f.row_bytes(RANK, ROPE)} bytes per token\n\n"
    text += "| bytes | field | elements | dtype |\n|---|---|---|---|\n"
    for x in f.fields(RANK, ROPE):
        text += f"| [{x.offset}, {x.end}) | `{x.name}` | {x.count} | {x.dtype} |\n"
    return f"{text}\n{rule}\n"


def _record(f: RecordFormat) -> str:
    text = f"\n## `{f.name}`: {f.row_bytes} bytes per token\n\n"
    text += "| bytes of a page | field | elements | dtype | holds |\n|---|---|---|---|---|\n"
    for begin, width, plane in zip(f.begins(1), f.widths, f.planes, strict=True):
        token = f"{begin} n + {width} t" if begin else f"{width} t"
        for x in plane:
            at = f"{token} + [{x.offset}, {x.end})"
            text += f"| {at} | `{x.name}` | {x.count} | {x.dtype} | {_holds(f, x)} |\n"
    sizes = ", ".join(f"{f.page_bytes(n):,} ({n})" for n in PAGES)
    text += f"\nBytes from page to page (tokens in one): {sizes}"
    unit = f"; pages begin at multiples of {f.page_multiple}" if f.page_multiple > 1 else ""
    text += f"{unit}.\n"
    largest = float(jnp.finfo(next(x.dtype for x in f.fields if x.scale)).max)
    ours, *others = (f"`{r.equation(largest)}` (`{r.name}`)" for r in f.rules)
    text += f"\nScale of a group: {ours}. Other writers: {', '.join(others)}."
    return f"{text}{f' Values are rounded to {f.rounds} first.' if f.rounds else ''}\n"


def _holds(f: RecordFormat, x: Field) -> str:
    if x.scale:
        return f"codes; one `{x.scale}` for {x.count // f.field(x.scale).count}"
    if x.padding:
        return "zeros"
    if x in f.values:
        return "`x` cast; of the same dtype, every bit"
    return "`s = 2^(byte - 127)`; 255 is NaN" if x.dtype == "float8_e8m0fnu" else "`s`"


MEASURED = re.compile(
    r"<!-- measured (?P<suite>\w+): (?P<keys>[^:\n]+): (?P<cases>[^:\n]+) -->\n"
    r".*?<!-- end of measured -->",
    re.DOTALL,
)
"""A table of a page: suite, keys of a row, cases. What is between is written here."""

COLUMNS = {
    "us": "µs", "span_us": "µs", "ours_span_us": "µs", "floor_us": "floor µs", "peer": "peer",
    "peer_span_us": "peer µs", "copy_span_us": "copy µs", "ratio_span": "peer / ours",
    "floor_percent": "% of the floor", "copy_percent": "% of a copy", "recall": "recall",
    "copy_percent_ordered": "%, pages in order", "times_floor": "times the floor",
    "peer_logits_us": "DeepGEMM's scores, µs", "peer_topk_us": "vLLM's top-k, µs",
    "ratio_logits": "scores, peer / ours", "ratio": "peer / ours",
    "bf16_us": "bf16 weights, µs", "of_bf16": "part of bf16's time", "error": "error",
    "product_us": "product, µs", "peer_us": "peer µs",
}  # fmt: skip
"""Keys of a result that pages may show."""

HUNDREDTHS = ("ratio", "ratio_logits", "ratio_span", "times_floor", "recall", "of_bf16")


def measured(found: re.Match[str]) -> str:
    """The table of one marker, from the newest results of its suite."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"nvidia_h200_{found['suite']}_2*.json"))
    rows = {row["case"]: row for row in json.loads(files[-1].read_text())["rows"]}
    keys, cases = found["keys"].split(), found["cases"].split()
    lines = [f"| case | {' | '.join(COLUMNS[k] for k in keys)} |", "|---" * (1 + len(keys)) + "|"]
    for case in cases:
        cells = (_cell(key, rows[case].get(key)) for key in keys)
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    opening, _, _ = found[0].partition("\n")
    date = files[-1].stem[-10:]
    table = "\n".join(lines)
    return f"{opening}\nSuite `{found['suite']}`, {date}.\n\n{table}\n<!-- end of measured -->"


def _cell(key: str, value: float | str | None) -> str:
    if value is None or value != value:  # absent, or NaN
        return "–"
    if isinstance(value, str):
        return value
    if key == "error":
        return f"{value:.4f}"
    digits = 0 if "percent" in key else 2 if key in HUNDREDTHS else 1
    return f"{value:.{digits}f}"


DEFINITION = re.compile(
    r"<!-- definition (?P<file>[\w/]+\.py): (?P<names>[\w ]+) -->\n.*?<!-- end of definition -->",
    re.DOTALL,
)
"""Functions of a file, as they stand there. The test suite runs blocks of ``python``, not these."""


def definition(found: re.Match[str]) -> str:
    """The functions of one marker, in its order."""
    source = (ROOT / "mla_jax" / found["file"]).read_text()
    nodes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    texts = (ast.get_source_segment(source, nodes[name]) for name in found["names"].split())
    opening, _, _ = found[0].partition("\n")
    code = "\n\n\n".join(filter(None, texts))
    return f"{opening}\n```py\n{code}\n```\n<!-- end of definition -->"


def page(path: Path) -> str:
    """A page with the definitions and tables of all of its markers."""
    return DEFINITION.sub(definition, MEASURED.sub(measured, path.read_text()))


GENERATED = {
    str(path.relative_to(ROOT)): functools.partial(page, path)
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if MEASURED.search(path.read_text()) or DEFINITION.search(path.read_text())
} | {
    "README.md": readme,
    "docs/cache_formats.md": cache_formats,
    "docs/numerics.md": numerics,
    "docs/testing.md": testing,
}


def main(check: bool) -> int:
    stale = []
    for name, write in GENERATED.items():
        path, text = ROOT / name, write()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    verb = "out of date" if check else "written"
    print(f"{verb}: {', '.join(stale)}" if stale else "everything generated is up to date")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
