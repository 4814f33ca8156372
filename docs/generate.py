"""Print the documents that are made from data: ``python docs/generate.py`` rewrites them."""

from pathlib import Path

from mla_jax.cache import FORMATS
from mla_jax.ops import support_matrix

RANK, ROPE = 512, 64


def cache_formats() -> str:
    """Every token record, byte by byte, at the widths of DeepSeek V3."""
    text = f"""# Cache formats

A cache is `[pages, page, row]`, contiguous: token `slot = page_id * page + offset` starts at
byte `slot * row_bytes`. A record is the latent after its norm, then the rotary key after its
rotation. Bytes are given for rank {RANK} and rope {ROPE}; elements are little-endian.
Rows that no token was written to hold anything and are never used.

This page is printed from `mla_jax.cache.FORMATS` by `docs/generate.py`.
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


def support() -> str:
    """Which backend runs what, from the registry."""
    return f"""# Support matrix

Of one operation's backends, an earlier row is preferred. `explain` says why for one call.
This page is printed from the registry by `docs/generate.py`.

{support_matrix()}"""


PAGES = {"cache_formats.md": cache_formats, "support_matrix.md": support}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page())
