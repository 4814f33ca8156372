"""Quantised token records of the sparse models, byte for byte: codecs and paged writes.

| record | bytes of one token | scales |
|---|---|---|
| ``ds_mla`` (V3.2) | 512 e4m3, 4 float32 scales, 64 bfloat16 rotary, interleaved: 656 | per 128 |
| ``v4`` | 448 e4m3, 64 bfloat16 rotary; 7 exponent bytes and a 0 behind the page: 584 | per 64 |
| ``index_key`` | 128 e4m3; then one float32 scale behind the page: 132 | per token |

A code is ``e4m3(x / scale)``, rounded to nearest even and saturating; its value is
``float32(code) * scale``. Power-of-two scales are exact in every float format.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mla_jax.types import Array, Float, Int, UInt8, round_up

__all__ = [
    "pack_ds_mla",
    "pack_v4",
    "quantise_index_keys",
    "scatter_rows",
    "split_index_pages",
    "unpack_ds_mla",
    "unpack_v4",
    "v4_page_bytes",
    "write_index_keys",
    "write_v4",
]

E4M3_MAX = 448.0
FLOAT32_TINY = 2.0**-126


def ceil_exponent(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Smallest ``e`` with ``2^e >= x``, for positive normal float32: exact, from the bits."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def power_of_two(e: Int[Array, "..."]) -> Float[Array, "..."]:
    """``2^e`` in float32 for ``-126 <= e <= 127``, from the bits."""
    return lax.bitcast_convert_type((e + 127) << 23, jnp.float32)


def to_e4m3(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Codes of ``x``, saturating at 448; a NaN stays a NaN."""
    clamped = jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(clamped, jnp.uint8)


def from_e4m3(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of codes in float32."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def as_bytes(x: Array) -> UInt8[Array, "..."]:
    """Little-endian bytes of the last axis."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def from_bytes(raw: UInt8[Array, "..."], dtype: DTypeLike) -> Array:
    """Inverse of ``as_bytes``."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(raw.reshape(*raw.shape[:-1], -1, size), dtype)


def _divide(x: Array, divisor: Array | float) -> Array:
    """A true division: compilers multiply by the reciprocal of a constant or a scalar."""
    divisor = jnp.broadcast_to(jnp.asarray(divisor, jnp.float32), x.shape)
    return x / lax.optimization_barrier(divisor)


def scatter_rows(rows: Array, values: Array, slots: Int[Array, "tokens"]) -> Array:
    """``rows[slots] = values``; a negative slot stores nothing."""
    place = jnp.where(slots < 0, rows.shape[0], slots)
    return rows.at[place].set(values, mode="drop")


def pack_ds_mla(
    kv_latent: Float[Array, "tokens 512"],
    k_rope: Float[Array, "tokens 64"],
    *,
    power_of_two_scales: bool = True,
) -> UInt8[Array, "tokens 656"]:
    """V3.2 records. ``power_of_two_scales`` is what every reader reads exactly.

    ``scale = 2^ceil(log2(max(amax / 448, 1e-4)))`` per 128 channels, or the older writers'
    ``max(amax / 448, 2^-126)``.
    """
    x = kv_latent.astype(jnp.float32).reshape(-1, 4, 128)
    ratio = _divide(jnp.max(jnp.abs(x), axis=-1), E4M3_MAX)
    if power_of_two_scales:
        scale = power_of_two(ceil_exponent(jnp.maximum(ratio, 1e-4)))
    else:
        scale = jnp.maximum(ratio, FLOAT32_TINY)
    codes = to_e4m3(_divide(x, scale[..., None])).reshape(-1, 512)
    rope = as_bytes(k_rope.astype(jnp.bfloat16))
    return jnp.concatenate([codes, as_bytes(scale), rope], axis=-1)


def unpack_ds_mla(records: UInt8[Array, "*tokens 656"]) -> Float[Array, "*tokens 576"]:
    """bfloat16 rows ``[latent | rope]``: ``bfloat16(float32(code) * scale)``, either scale."""
    codes, scales = records[..., :512], from_bytes(records[..., 512:528], jnp.float32)
    grouped = from_e4m3(codes).reshape(*codes.shape[:-1], 4, 128)
    latent = (grouped * scales[..., None]).reshape(codes.shape).astype(jnp.bfloat16)
    return jnp.concatenate([latent, from_bytes(records[..., 528:], jnp.bfloat16)], axis=-1)


def v4_page_bytes(page: int) -> int:
    """Bytes from one V4 page to the next: 584 a token, rounded up to a multiple of 576."""
    return round_up(page * 584, 576)


def pack_v4(
    k: Float[Array, "*tokens 512"], *, floor_of_scale: bool = False
) -> tuple[UInt8[Array, "*tokens 576"], UInt8[Array, "*tokens 8"]]:
    """``(data, scale)`` bytes of V4 rows, the scale byte being its exponent plus 127.

    ``scale = 2^ceil(log2(max(amax, 1e-4) / 448))`` per 64 of the first 448 channels;
    ``floor_of_scale`` puts the floor on the quotient instead, as FlashMLA's test quantiser does.
    """
    k = k.astype(jnp.bfloat16)
    x = k[..., :448].astype(jnp.float32).reshape(*k.shape[:-1], 7, 64)
    amax = jnp.max(jnp.abs(x), axis=-1)
    ratio = (
        jnp.maximum(_divide(amax, E4M3_MAX), 1e-4)
        if floor_of_scale
        else _divide(jnp.maximum(amax, 1e-4), E4M3_MAX)
    )
    e = ceil_exponent(ratio)
    codes = to_e4m3(x * power_of_two(-e)[..., None]).reshape(*k.shape[:-1], 448)
    data = jnp.concatenate([codes, as_bytes(k[..., 448:])], axis=-1)
    exponents = jnp.clip(e + 127, 0, 255).astype(jnp.uint8)
    return data, jnp.concatenate([exponents, jnp.zeros_like(exponents[..., :1])], axis=-1)


def unpack_v4(
    data: UInt8[Array, "*tokens 576"], scale: UInt8[Array, "*tokens 8"]
) -> Float[Array, "*tokens 512"]:
    """bfloat16 rows of V4 records."""
    factor = power_of_two(scale[..., :7].astype(jnp.int32) - 127)
    grouped = from_e4m3(data[..., :448]).reshape(*data.shape[:-1], 7, 64)
    latent = (grouped * factor[..., None]).reshape(*data.shape[:-1], 448).astype(jnp.bfloat16)
    return jnp.concatenate([latent, from_bytes(data[..., 448:], jnp.bfloat16)], axis=-1)


def write_v4(
    pages: UInt8[Array, "pages page_bytes"],
    k: Float[Array, "tokens 512"],
    slots: Int[Array, "tokens"],
    *,
    page: int,
) -> UInt8[Array, "pages page_bytes"]:
    """Store V4 rows: a page is ``page`` data records, then ``page`` scale records."""
    data, scale = pack_v4(k)
    return _write_planes(pages, (data, scale), slots, page=page)


def quantise_index_keys(
    k: Float[Array, "tokens dim"], *, power_of_two_scales: bool
) -> tuple[UInt8[Array, "tokens dim"], Float[Array, "tokens"]]:
    """``(codes, scales)`` of index keys, one scale a token: ``max(amax, 1e-4) / 448``."""
    x = k.astype(jnp.float32)
    scale = _divide(jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-4), E4M3_MAX)
    if power_of_two_scales:
        scale = power_of_two(ceil_exponent(scale))
    return to_e4m3(_divide(x, scale[:, None])), scale


def write_index_keys(
    pages: UInt8[Array, "pages page_bytes"],
    k: Float[Array, "tokens dim"],
    slots: Int[Array, "tokens"],
    *,
    page: int,
    power_of_two_scales: bool = True,
) -> UInt8[Array, "pages page_bytes"]:
    """Store index keys: a page is ``page`` rows of codes, then ``page`` float32 scales."""
    codes, scale = quantise_index_keys(k, power_of_two_scales=power_of_two_scales)
    return _write_planes(pages, (codes, as_bytes(scale[:, None])), slots, page=page)


def split_index_pages(
    pages: UInt8[Array, "pages page_bytes"], *, page: int, dim: int = 128
) -> tuple[UInt8[Array, "slots dim"], Float[Array, "slots"]]:
    """``(codes, scales)`` of every slot of an index-key cache."""
    codes, scales = _planes(pages, (dim, 4), page=page)
    return codes, from_bytes(scales, jnp.float32)[:, 0]


def _planes(pages: Array, widths: tuple[int, ...], *, page: int) -> list[Array]:
    """The parts of every page, each as ``[slots, width]``."""
    parts, begin = [], 0
    for width in widths:
        parts.append(pages[:, begin : begin + page * width].reshape(-1, width))
        begin += page * width
    return parts


def _write_planes(
    pages: Array, records: tuple[Array, ...], slots: Int[Array, "tokens"], *, page: int
) -> Array:
    widths = tuple(r.shape[-1] for r in records)
    parts = [
        scatter_rows(rows, values, slots).reshape(pages.shape[0], -1)
        for rows, values in zip(_planes(pages, widths, page=page), records, strict=True)
    ]
    return jnp.concatenate([*parts, pages[:, page * sum(widths) :]], axis=1)
