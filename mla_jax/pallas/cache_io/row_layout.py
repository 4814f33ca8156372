"""Where a row lies in any cache, as the static numbers that ``row_triton.store_row`` takes."""

from typing import Any

from mla_jax.cache import LatentCache, RecordCache
from mla_jax.pallas.registry import OneOf

__all__ = ["ROWS", "layout"]

ROWS = OneOf("bf16", "fp16", "fp32", "v4", "index_key")
"""Formats that ``store_row`` stores; e4m3 elements need a scale."""


def layout(cache: LatentCache | RecordCache) -> tuple[Any, ...]:
    """Layers and slots of each, then, by index, what records have; 0 for elements.

    2 to 6: tokens and bytes of a page, codes of a row, codes of a group, stored scales with their
    padding. 7 to 12: first byte and bytes of a token's part for codes, scales and elements (-1: no
    elements). 13: whether scales are exponents. 14: elements of a row. 15 to 18, the rule: whether
    scales are powers of two, their floor, whether it is that of the maximum, whether values are
    rounded to bfloat16 first.
    """
    sizes = cache.layers or 1, cache.num_slots
    if isinstance(cache, LatentCache):
        return (*sizes, 0)
    fmt, page = cache.format, cache.page
    planes = {f.name: p for p, plane in enumerate(fmt.planes) for f in plane}

    def part(name: str) -> tuple[int, int]:
        return fmt.offset(name, 0, page=page), fmt.widths[planes[name]]

    (codes,) = (f for f in fmt.values if f.scale)
    plain = next((f for f in fmt.values if not f.scale), None)
    scales, rule = fmt.field(codes.scale), fmt.rules[0]
    padding = sum(f.count for f in fmt.planes[planes[scales.name]] if f.padding)
    return (
        *sizes,
        *(page, fmt.page_bytes(page), codes.count, codes.count // scales.count),
        scales.count + padding,
        *part(codes.name),
        *part(scales.name),
        *((-1, 0) if plain is None else part(plain.name)),
        scales.dtype != "float32",
        0 if plain is None else plain.count,
        *(rule.power_of_two, rule.floor, rule.floor_of == "amax", fmt.rounds == "bfloat16"),
    )
