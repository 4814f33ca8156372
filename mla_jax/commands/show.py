"""How the commands print: tables and bars in a terminal, the same as an HTML or SVG file."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_jax.commands.parity import Parity
from mla_jax.errors import ArgumentError

try:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise SystemExit(f"mla-jax needs {missing.name}: pip install 'mla-jax[cli]'") from None

__all__ = ["parity_report", "show", "table"]

_WIDTH = 120
_FORMATS = (".html", ".svg")


def show(report: RenderableType, *, title: str, out: Path | None = None) -> None:
    """Print a report and, if ``out`` is given, write it there too.

    Raises:
        ArgumentError: the file's ending is not one that can be written.
    """
    if out is not None and out.suffix not in _FORMATS:
        raise ArgumentError("--out", out, f"a file whose name ends in {' or '.join(_FORMATS)}")
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
        table("conventions that these tokens tell apart", heads, conventions),
        Text(""),
    ]
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
