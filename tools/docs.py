"""Write what the documentation derives from the code: ``python tools/docs.py [--check]``.

The support matrix of README.md comes from the registry, docs/cache_formats.md from ``FORMATS``.
"""

import sys
from pathlib import Path

from mla_jax.cache import FORMATS
from mla_jax.ops import support_matrix

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- support matrix: written by `make docs` -->"
END = "<!-- end of support matrix -->"
RANK, ROPE = 512, 64


def readme() -> str:
    """README.md with the current support matrix between its markers."""
    before, _, rest = (ROOT / "README.md").read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{support_matrix().strip()}\n{END}{after}"


def cache_formats() -> str:
    """Token records byte by byte, for the widths of DeepSeek-V3."""
    lines = [
        "# Cache formats",
        "",
        "Written by `make docs` from `mla_jax.cache.FORMATS`. One token of one layer is a record",
        "of `rank + rope` elements without padding: the latent after its norm, then the shared",
        "rotary key after rotation, in checkpoint order. Slot `s` of a cache is record",
        "`s % page` of page `s // page`. A quantised format has one float32 scale per cache:",
        "`stored = cast(clamp(x / scale, -448, 448))`, `x = stored * scale`.",
        "",
        f"Offsets and sizes in bytes for rank {RANK} and rope {ROPE}.",
        "",
        "| format | field | offset | elements | dtype | record | scaled |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, fmt in FORMATS.items():
        total, scaled = fmt.row_bytes(RANK, ROPE), "yes" if fmt.quantised else "no"
        lines += [
            f"| `{name}` | `{f.name}` | {f.offset} | {f.count} | `{f.dtype}` | {total} | {scaled} |"
            for f in fmt.fields(RANK, ROPE)
        ]
    return "\n".join(lines) + "\n"


GENERATED = {"README.md": readme, "docs/cache_formats.md": cache_formats}


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
