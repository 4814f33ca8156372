"""How the commands print: tables and bars in a terminal, the same as an HTML or SVG file."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_jax.commands.fit import Compiled, Fit
from mla_jax.commands.parity import Parity
from mla_jax.commands.roofline import Roofline
from mla_jax.commands.step_kernels import Kernel
from mla_jax.errors import ArgumentError

try:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise SystemExit(f"mla-jax needs {missing.name}: pip install typer rich") from None

__all__ = ["checked_out", "fit_report", "parity_report", "roofline_report", "show", "table"]

_WIDTH = 120
_FORMATS = (".html", ".svg")


def show(report: RenderableType, *, title: str, out: Path | None = None) -> None:
    """Print a report and, if ``out`` is given, write it there too."""
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(record=out is not None, width=width, highlight=False)
    console.print(report)
    if out is None:
        return
    if out.suffix == ".svg":
        console.save_svg(str(out), title=title)
    else:
        console.save_html(str(out))
    print(f"written: {out}", file=sys.stderr)


def checked_out(out: Path | None) -> Path | None:
    """Where a report can be written, before it is made.

    Raises:
        ArgumentError: the name's ending is not one that can be written, or its folder is missing.
    """
    if out is not None and out.suffix not in _FORMATS:
        raise ArgumentError("--out", out, f"a file whose name ends in {' or '.join(_FORMATS)}")
    if out is not None and not out.parent.is_dir():
        raise ArgumentError(
            "--out", out, "a file in a folder that exists", "Make the folder first."
        )
    return out


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose columns that are numbers stand on the right; names end with ``>`` for that."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        right = name.endswith(">")
        made.add_column(name.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(x if isinstance(x, Text) else Text(str(x)) for x in row))
    return made


def parity_report(parity: Parity) -> RenderableType:
    """Per tensor the largest difference; the first that diverges; the conventions; the faults."""
    rows = [
        (
            Text(row.name, style="bold red" if row.diverges else ""),
            " x ".join(map(str, row.shape)),
            f"{row.difference:.1e}",
            f"{row.magnitude:.3g}",
            Text("diverges", style="bold red") if row.diverges else _digits(row.difference),
        )
        for row in (*parity.rows, *parity.served)
    ]
    columns = ("tensor", "shape", "largest difference>", "largest value>", "")
    conventions = [
        (
            name,
            expected,
            *(Text(x, style="" if x == expected else "bold red") for x in (theirs, mine)),
        )
        for name, expected, theirs, mine in parity.conventions
    ]
    heads = ("convention", "config.json", "transformers", "mla_jax")
    parts: list[RenderableType] = [
        Text(f"{parity.folder}: {parity.config.family}, {parity.config.layers} layers"),
        Text(""),
        table(f"tensors of {parity.tokens} tokens, float32", columns, rows),
        Text(""),
    ]
    if conventions:
        named = table("conventions that these tokens tell apart", heads, conventions)
        parts += [named, Text("")]
    if parity.agrees:
        worst = max((r.difference for r in (*parity.rows, *parity.served)), default=0.0)
        parts.append(Text(f"equal: no tensor differs by more than {worst:.1e}", style="green"))
    else:
        parts.append(Text(f"first to diverge: {parity.first}", style="bold red"))
    parts += [Text(f"{finding}") for finding in parity.findings]
    return Group(*parts)


def _digits(difference: float) -> str:
    """A bar of one sign for each decimal from 1e-8 on."""
    if not 0 < difference < math.inf:
        return ""
    return "▪" * max(1, round(math.log10(difference) + 8))


_BAR = 24  # signs of the longest bar
_COLOURS = {"memory": "cyan", "products": "magenta"}


def roofline_report(roofline: Roofline) -> RenderableType:
    """A row for each kernel of the step, a bar for its share of the time, and the sums."""
    step, peaks = roofline.step, roofline.peaks
    longest = max(k.calls * k.us(peaks) for k in roofline.kernels)
    rows = [_kernel_row(k, roofline, longest) for k in roofline.kernels]
    sizes = ("calls>", "MB>", "GFLOP>", "floor us>", "us>")
    columns = ("kernel", *sizes, "from", "bound by", "time of all calls")
    of = f"{step.batch} request{'s' * (step.batch > 1)} of {step.context:,} "
    of += "cached tokens" if step.phase == "decode" else "new tokens"
    title = f"{step.config.family} on {peaks.kind}: {step.phase} step, {of}"
    title += f", {step.weights} weights, {step.cache} cache"
    floor, us = roofline.floor_us, roofline.us
    sums = [
        f"bytes: {roofline.total('bytes') / 1e9:.3f} GB "
        f"(weights {roofline.total('weights') / 1e9:.3f}, "
        f"caches {roofline.total('cache') / 1e9:.3f}, "
        f"activations {roofline.total('activations') / 1e9:.3f})",
        f"products: {roofline.total('flops') / 1e12:.3f} TFLOP",
        f"floor: {floor / 1e3:.3f} ms; measured and predicted kernels: {us / 1e3:.3f} ms, "
        f"{step.tokens / us * 1e6:,.0f} tokens/s",
    ]
    read = sorted({k.measured.row for k in roofline.kernels if k.measured})
    notes = [f"measured row: {row}, scaled by the floors of both sizes" for row in read]
    notes.append("predicted: at 89 % of the bandwidth and 81 % of the products of the data sheet")
    lines = [Text(line) for line in (*sums, *notes)]
    return Group(Text(title), Text(""), table("of one call", columns, rows), Text(""), *lines)


def _kernel_row(kernel: Kernel, roofline: Roofline, longest: float) -> tuple[object, ...]:
    peaks = roofline.peaks
    us, bound = kernel.us(peaks), kernel.bound(peaks)
    signs = _BAR * kernel.calls * us / longest
    bar = "█" * int(signs) + ("▌" if signs % 1 >= 0.5 else "")
    return (
        kernel.name,
        kernel.calls,
        f"{kernel.bytes / 1e6:,.2f}",
        f"{kernel.flops / 1e9:,.2f}",
        f"{kernel.floor_us(peaks):,.2f}",
        f"{us:,.2f}",
        "measured" if kernel.measured else "predicted",
        bound,
        Text(bar, style=_COLOURS[bound]),
    )


def fit_report(fit: Fit, compiled: Compiled | None = None) -> RenderableType:
    """Bytes of one card, bytes of a token in each cache group, the largest batches."""
    settings = fit.settings
    held = [
        ("room", f"{fit.room:,}"),
        ("weights", f"{fit.weights:,}"),
        ("derived weights", f"{fit.derived:,}"),
        *((f"cache {name}, one token", f"{size:,.1f}") for name, size in fit.groups.items()),
        ("caches, one token", f"{fit.token:,.1f}"),
        ("caches, each request of any length", f"{fit.fixed:,}"),
        ("token history, each request", f"{fit.history:,}"),
        ("caches, once", f"{fit.once:,}"),
    ]
    title = f"{settings.config.family}, {settings.cards} x: {settings.dtype}"
    title += ", e4m3 weights" if settings.fp8 else ""
    title += f", {settings.cache_format} cache in pages of {settings.page}"
    rows = [(f"{n:,}", f"{batch:,}", f"{n * batch:,}") for n, batch in fit.largest.items()]
    heads = ("tokens of a request>", "requests at once>", "tokens together>")
    parts: list[RenderableType] = [
        Text(title),
        Text(""),
        table("bytes of one card", ("what", "bytes>"), held),
        Text(""),
        table("largest batch", heads, rows),
    ]
    if not any(fit.largest.values()):
        over = fit.weights + fit.derived - fit.room
        missing = f"weights alone need {over / 1e9:,.1f} GB more" if over > 0 else "no request fits"
        parts.append(Text(f"nothing fits: {missing} on each card", style="bold red"))
    if compiled is not None:
        parts += [Text(""), Text(_compiled(compiled))]
    return Group(*parts)


def _compiled(c: Compiled) -> str:
    return (
        f"compiled for {c.platform}, {c.batch} requests of {c.context:,} tokens: "
        f"arguments {c.arguments:,} bytes, predicted {c.predicted:,} ({c.error:+.2%}); "
        f"{c.temporaries:,} more while it runs"
    )
