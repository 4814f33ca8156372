"""``python -m benchmarks.table`` writes docs/performance.md and a table of docs/starting.md."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["page", "starting"]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
STARTING = ROOT / "docs" / "starting.md"

HEAD = """# Performance

Written by `python -m benchmarks.table` from `benchmarks/results/`, newest first; do not edit.

A ratio is the peer's time over ours, both from one run: above 1.00 we are faster. *Sum* adds up
the kernels of an isolated call, where overlapping ones count twice; *span* is from the start of
the first to the end of the last. *Back to back* is what one more call takes in a row of many.
The floor is the larger of FLOPs / 800 TFLOP/s and bytes / 4.25 TB/s.
"""

type Columns = dict[str, tuple[str, int]]  # heading: key, digits

TIMES: Columns = {
    "sum µs": ("ours_us", 1),
    "span µs": ("ours_span_us", 1),
    "back to back µs": ("ours_slope_us", 1),
    "peer sum": ("peer_us", 1),
    "peer span": ("peer_span_us", 1),
    "peer back to back": ("peer_slope_us", 1),
    "ratio sum": ("ratio", 2),
    "ratio span": ("ratio_span", 2),
    "ratio back to back": ("ratio_slope", 2),
}
RATES: Columns = {
    "TFLOP/s": ("tflops", 0),
    "GB/s": ("gbs", 0),
    "% of floor": ("floor_percent", 0),
    "error": ("error", 4),
}
COPY: Columns = {"copy span": ("copy_us", 1), "% of copy": ("copy_percent", 0)}
STEP: Columns = {
    "faster peer": ("peer", 0),
    "with plan µs": ("ours_step_us", 1),
    "peer with plan": ("peer_step_us", 1),
    "ratio with plan": ("ratio_step", 2),
}
CONCAT: Columns = {
    "concat sum": ("ratio_concat", 2),
    "concat span": ("ratio_concat_span", 2),
    "concat back to back": ("ratio_concat_slope", 2),
}
TRAFFIC: Columns = {
    "span µs": ("ours_span_us", 1),
    "back to back µs": ("ours_slope_us", 1),
    "copy span": ("copy_span_us", 1),
    "copy back to back": ("copy_slope_us", 1),
    "torch span": ("peer_span_us", 1),
    "torch back to back": ("peer_slope_us", 1),
    "XLA sum": ("xla_us", 1),
    "GB/s": ("gbs", 0),
    "% of copy": ("copy_percent", 1),
    "% of copy, pages in order": ("copy_percent_ordered", 1),
    "% of copy back to back": ("copy_percent_slope", 1),
    "ratio to torch": ("ratio_span", 2),
    "back to back": ("ratio_slope", 2),
}
METADATA: Columns = {
    "requests": ("requests", 0),
    "tokens": ("tokens", 0),
    "kernels µs": ("kernels_us", 1),
    "kernels": ("kernels", 0),
    "in a loop µs": ("chain_us", 1),
    "target": ("target_us", 0),
    "host µs": ("host_us", 0),
    "host, least": ("least_us", 0),
    "in a row": ("row_us", 0),
    "of it decide": ("decide_us", 0),
    "of it call": ("call_us", 0),
    "decide, warm": ("warm_us", 0),
    "call of jit": ("jit_us", 0),
    "an empty call": ("empty_us", 0),
    "returning all": ("alone_us", 0),
}
EXPERTS: Columns = {
    "µs": ("us", 1),
    "floor µs": ("floor_us", 1),
    "times the floor": ("times_floor", 2),
    "vLLM µs": ("peer_us", 1),
    "ratio": ("ratio", 2),
    "faster peer": ("peer", 0),
    "error": ("error", 4),
}
SERVE: Columns = {
    "µs": ("ours_us", 0),
    "vLLM µs": ("peer_us", 0),
    "ratio": ("ratio", 2),
    "faster peer": ("peer", 0),
    "tokens/s": ("tokens_per_s", 0),
    "floor µs": ("floor_us", 0),
    "% of floor": ("floor_percent", 0),
    "kernels busy, %": ("busy_percent", 0),
    "kernels a step": ("events_a_step", 0),
    "weights, bytes": ("weight_bytes", 0),
    "caches, bytes": ("cache_bytes", 0),
    "peak, bytes": ("peak_bytes", 0),
}
FP8: Columns = {
    "µs": ("us", 1),
    "bf16 µs": ("bf16_us", 1),
    "ratio": ("ratio", 2),
    "part of bf16's time": ("of_bf16", 2),
    "peer µs": ("peer_us", 1),
    "ratio to the peer": ("peer_ratio", 2),
    "floor µs": ("floor_us", 1),
    "times the floor": ("times_floor", 2),
    "error": ("error", 4),
}
SPARSE: Columns = {
    "µs": ("us", 1),
    "span µs": ("span_us", 1),
    "peer µs": ("peer_us", 1),
    "peer span": ("peer_span_us", 1),
    "ratio": ("ratio", 2),
    "ratio span": ("ratio_span", 2),
    "triton µs": ("triton_us", 1),
    "its ratio": ("ratio_triton", 2),
    "floor µs": ("floor_us", 1),
    "recall": ("recall", 4),
    "workspace, bytes": ("workspace_bytes", 0),
    "error": ("error", 4),
}
V32_DENSE: Columns = {
    "sparse µs": ("sparse_us", 1),
    "select µs": ("select_us", 1),
    "attend µs": ("attend_us", 1),
    "dense µs": ("dense_us", 1),
    "ratio": ("ratio", 2),
    "sparse span": ("sparse_span_us", 1),
    "dense span": ("dense_span_us", 1),
    "ratio span": ("ratio_span", 2),
    "floor µs": ("floor_us", 1),
    "dense floor": ("dense_floor_us", 1),
    "error": ("error", 4),
}
V4_LAYER: Columns = {
    "µs": ("ours_us", 1),
    "kernels, µs": ("busy_us", 1),
    "floor µs": ("floor_us", 1),
    "attention µs": ("attention_us", 1),
    "its span": ("attention_span_us", 1),
    "its floor µs": ("attention_floor_us", 1),
    "its products µs": ("products_us", 1),
    "their floor": ("products_floor_us", 1),
    "caches, bytes": ("cache_bytes", 0),
}
V4_STEP: Columns = {
    "µs": ("us", 1),
    "span µs": ("span_us", 1),
    "vLLM µs": ("peer_us", 1),
    "ratio": ("ratio", 2),
    "peer": ("peer", 0),
    "xla µs": ("xla_us", 1),
    "its ratio": ("ratio_xla", 2),
    "floor µs": ("floor_us", 1),
    "error": ("error", 4),
    "peer's error": ("peer_error", 4),
}
START: Columns = {
    "layers": ("layers", 0),
    "programs": ("programs", 0),
    "one program, s": ("compile_s", 1),
    "cold, s": ("cold_s", 1),
    "stored, s": ("warm_s", 1),
}


@dataclass(frozen=True)
class Suite:
    """What a suite's rows mean, and their columns."""

    text: str
    columns: Columns


SUITES = {
    "decode": Suite(
        "Dense decode beside the faster of FlashMLA and FA3's MLA decode. Case names: requests, "
        "queries of each, heads, keys of each (ragged: 1 to 16384). *With plan*: back to back, the "
        "plan made by every call.",
        TIMES | STEP | RATES | COPY,
    ),
    "prefill": Suite(
        "Prefill beside FlashAttention-3: its kernels alone, and with the concatenation of the "
        "keys that it must be given (`concat`). Case names: heads, requests x queries of each "
        "(ragged: 1000, 3000, 17, 4500), causal, or keys and full.",
        TIMES | CONCAT | RATES,
    ),
    "gather": Suite(
        "Cache traffic beside a device-to-device copy that moves as many bytes, in the same run. "
        "Case names: operation, format of the cache, megabytes of stored rows.",
        TRAFFIC,
    ),
    "chunked_prefill": Suite(
        "New tokens on cached context: gather, up-projection, attention and merges, beside a "
        "CUDA-graphed torch assembly of the same steps with FlashAttention-3.",
        TIMES | RATES,
    ),
    "layer": Suite(
        "One V3-shaped attention layer with its projections, beside a CUDA-graphed torch layer "
        "with FlashMLA or FlashAttention-3.",
        TIMES | RATES,
    ),
    "experts": Suite(
        "The routed experts of one layer, choices given, by the fastest of some tunings, "
        "beside vLLM's fused Triton experts where they were timed. "
        "Case names: model, tokens. The floor here: the larger of the chosen experts' bytes / 4.8 "
        "TB/s and FLOPs / 800 TFLOP/s.",
        EXPERTS,
    ),
    "metadata": Suite("All metadata of one step, and parts that are derived later.", METADATA),
    "fp8_matmul": Suite(
        "Products of many rows with block-scaled e4m3 weights, rows rounded to e4m3, beside "
        "DeepGEMM's. Case names: rows x channels, columns.",
        {
            "µs": ("us", 1),
            "product µs": ("product_us", 1),
            "DeepGEMM µs": ("peer_us", 1),
            "ratio of products": ("ratio", 2),
            "bf16 µs": ("bf16_us", 1),
            "floor µs": ("floor_us", 1),
            "error": ("error", 4),
        },
    ),
    "fp8": Suite("Products with block-scaled e4m3 weights beside bf16 weights.", FP8),
    "sparse_decode": Suite(
        "Sparse decode over 2,048 slots a token, beside FlashMLA's. Case names: requests, queries "
        "of each, heads, format of the cache.",
        SPARSE,
    ),
    "sparse_prefill": Suite(
        "Sparse prefill over gathered rows, beside FlashMLA's. Case names: tokens x rows, heads.",
        SPARSE,
    ),
    "v4_decode": Suite(
        "V4's decode over a window and compressed rows of a second cache, beside FlashMLA's. Case "
        "names: requests, heads, rows of both, rows in a page of the second cache.",
        SPARSE,
    ),
    "v32_dense": Suite(
        "V3.2's attention as a whole (index scores, the best 2,048, sparse attention) beside this "
        "library's dense kernels over the same lengths. Case names: requests x new tokens of each, "
        "context. The ratio: dense over sparse.",
        V32_DENSE,
    ),
    "v4_layer": Suite(
        "A decode step of one V4-Flash-shaped layer of each kind: a floor, no peer. Case names: "
        "ratio of the states, requests, tokens of each.",
        V4_LAYER,
    ),
    "v4_step": Suite(
        "V4's small steps: new rows and queries, compressed states of all pools of a layer, "
        "beside vLLM's kernels. Case names: operation (and ratio or format), tokens.",
        V4_STEP,
    ),
    "indexer": Suite(
        "Selection as a whole, index scores and the best 2,048, beside DeepGEMM's scores and "
        "vLLM's selection. Case names: queries x keys of each.",
        {
            "µs": ("us", 1),
            "scores": ("logits_us", 1),
            "floor": ("floor_us", 1),
            "DeepGEMM": ("peer_logits_us", 1),
            "vLLM's top-k": ("peer_topk_us", 1),
            "its kernel": ("peer_topk", 0),
            "ratio of scores": ("ratio_logits", 2),
            "ratio": ("ratio", 2),
            "recall": ("recall", 3),
            "workspace": ("workspace_bytes", 0),
        },
    ),
    "serve": Suite(
        "Decode of a model with random weights through `Engine.generate`, beside vLLM. Case names: "
        "model, layers, requests x context of each.",
        SERVE,
    ),
    "v4_context": Suite(
        "One sequence of 1,048,576 tokens on one card: two layers of V4-Flash's widths, prefilled "
        "in chunks. Peak memory beside what the engine says beforehand.",
        {
            "steps": ("steps", 0),
            "s": ("seconds", 1),
            "tokens of the prompt": ("prefill_tokens", 0),
            "prefill s": ("prefill_s", 1),
            "decode ms": ("decode_ms", 2),
            "tokens drawn": ("tokens", 0),
            "peak bytes": ("peak_bytes", 0),
            "said bytes": ("said_bytes", 0),
            "caches": ("cache_bytes", 0),
            "ready s": ("ready_s", 1),
        },
    ),
    "start": Suite(
        "How long an engine takes until it serves, with nothing compiled before and with stored "
        "programs (docs/starting.md).",
        START,
    ),
    "serve_prefill": Suite(
        "Prefill of a model with random weights through `Engine.generate`, beside vLLM.", SERVE
    ),
}


def page() -> str:
    """The text of docs/performance.md."""
    timed = (p for p in RESULTS.glob("*.json") if "_numerics_" not in p.stem)  # a page of its own
    paths = sorted(timed, key=lambda p: (_date(p), p.stem), reverse=True)
    return "\n".join([HEAD, *map(_section, paths)]).rstrip() + "\n"


def _date(path: Path) -> str:
    return path.stem.rsplit("_", 1)[1]


def _suite(path: Path) -> Suite:
    names = sorted(SUITES, key=len, reverse=True)
    found = re.search(rf"_({'|'.join(names)})_\d{{4}}-", path.stem)
    assert found, f"{path.name}: not DEVICE_SUITE_DATE.json with a suite of {names}"
    return SUITES[found[1]]


def _section(path: Path) -> str:
    record, suite = json.loads(path.read_text()), _suite(path)
    rows = record["rows"]
    columns = {h: c for h, c in suite.columns.items() if any(_given(r, c[0]) for r in rows)}
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    lines = [
        f"## {path.stem}",
        "",
        suite.text,
        "",
        f"{record['device']}; {versions}; clocks {record['clocks']}. {record['method']}.",
        "",
        *([record["note"], ""] if "note" in record else []),
        f"| case | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(_row(row, columns) for row in rows),
        "",
    ]
    main = [r for r in rows if r["case"] not in record.get("extra", [])]
    for key in (key for _, (key, _) in columns.items() if key.startswith("ratio")):
        found = [r[key] for r in main if _given(r, key)]
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            lines.append(f"- `{key}`: geometric mean {mean:.2f}, least {min(found):.2f}")
    return "\n".join([*lines, ""])


def _given(row: dict, key: str) -> bool:
    value = row.get(key)
    return bool(value) and (isinstance(value, str) or value > 0)


def _row(row: dict, columns: Columns) -> str:
    cells = (_cell(row[k], d) if _given(row, k) else "–" for k, d in columns.values())
    return f"| `{row['case']}` | {' | '.join(cells)} |"


def _cell(value: float | str, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def starting() -> str:
    """The text of docs/starting.md with the newest figures of suite ``start``."""
    newest = max(RESULTS.glob("*_start_*.json"), key=_date)
    rows = [_row(row, START) for row in json.loads(newest.read_text())["rows"]]
    table = [f"| case | {' | '.join(START)} |", f"|---|{'---|' * len(START)}", *rows]
    begin, end = "<!-- start: written by benchmarks.table -->", "<!-- end -->"
    before, rest = STARTING.read_text().split(begin)
    return "\n".join([before + begin, *table, end]) + rest.split(end, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
    STARTING.write_text(starting())
