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
    """Every token record, byte by byte, at the widths of DeepSeek V3."""
    text = f"""# Cache formats

A cache is `[pages, page, row]`, contiguous: token `slot = page_id * page + offset` starts at
byte `slot * row_bytes`. A record is the latent after its norm, then the rotary key after its
rotation. Bytes are given for rank {RANK} and rope {ROPE}; elements are little-endian.
Rows that no token was written to hold anything and are never used.

This page is printed from `mla_jax.cache.FORMATS` by `make docs`.
"""
    for f in FORMATS.values():
        rule = (
            "Stored: `cast(clamp(float32(x) / scale, -448, 448))`, a true division, rounded to "
            "nearest even; NaN stays NaN. Read: `float32(element) * scale`, rounded once to the "
            "dtype asked for. One float32 `scale` for the whole cache, shared by both fields."
            if f.quantised
            else "Stored: `x` cast to the element dtype; of the same dtype, every bit is kept."
        )
        text += f"\n## `{f.name}`: {f.row_bytes(RANK, ROPE)} bytes per token\n\n"
        text += "| bytes | field | elements | dtype |\n|---|---|---|---|\n"
        for x in f.fields(RANK, ROPE):
            text += f"| [{x.offset}, {x.end}) | `{x.name}` | {x.count} | {x.dtype} |\n"
        text += f"\n{rule}\n"
    return text


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
