"""e4m3 keys to the 16-bit tiles of the products, in shared memory of a Hopper block.

``take`` and ``put`` go by way of registers, ``keys`` widens in place. There the bytes of 64 keys
lie, key after key, behind the middle of the very place where the numbers go; of 256 columns, in
kilobytes::

          0         8         16        24        32
  before  .         .         b0   b1   b2   b3          parts of 16 keys
  after   n0        n1        n2        n3

All warps take each part together. Numbers of the first half of the parts overwrite no bytes; the
rest is in registers of all warps before the first of them stores any of it.

e4m3 is exact in bfloat16 and float16; the scale of the cache stays outside.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportInvalidTypeForm=false

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline

__all__ = ["STORED", "keys", "put", "raw", "take"]

KEYS = 64
STORED = jnp.float8_e4m3fn
KB = 1024
PART = 4 * KB  # bytes that a warpgroup takes at once: 32 of a thread
UNIT, TILES = 32, 9  # rows of ``take``, and their tiles of 64 columns
WORDS = UNIT * TILES * 16
TAKEN = plgpu.ShapeDtypeStruct(
    (WORDS,), jnp.int32, layout=plgpu.Layout.WG_STRIDED((WORDS,), vec_size=4)
)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SYNC = "bar.sync $1, 128;"


def raw(slots: int, columns: int) -> plgpu.SMEM:
    """The bytes of a ring of slots of 64 keys: ``[slot, 1]`` takes those of ``keys``."""
    return plgpu.SMEM((slots, 2, KEYS, columns), STORED)


def keys(slot, stored, *, simulate: bool) -> None:
    """Bytes in the upper half of a slot to its keys, by a warpgroup. Does not publish."""
    if simulate:
        slot[...] = stored[1].astype(slot.dtype)
        return
    text = _block(_keys(slot.dtype, slot.shape[1]))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),))
    def issue(_, place):
        operands = mgpu.utils.memref_ptr(place), mgpu.utils.warpgroup_barrier_idx(sync=False)
        inline.asm(text, operands, "r,r,~{memory}")

    issue(slot)


def take(unit, *, simulate: bool):
    """The bytes of 32 rows of 576, one behind the other, to registers of a warpgroup."""
    if simulate:
        return unit[...]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=TAKEN)
    def issue(_, place):
        count = 4 * TILES
        text, kind = _block(_take()), f"struct<({', '.join(['i32'] * count)})>"
        constraints = "=r," * count + "r,~{memory}"
        found = inline.asm(text, [mgpu.utils.memref_ptr(place)], constraints, result=kind)
        return inline.strided(inline.unpacked(found, count), vector=4)

    return issue(unit)


def put(taken, latent, rope, half: int, *, simulate: bool) -> None:
    """What ``take`` took, as keys ``32 half`` on of 64 x 512 and 64 x 64. Does not publish."""
    if simulate:
        keys, rank = taken.astype(latent.dtype), latent.shape[1]
        latent[pl.ds(UNIT * half, UNIT)] = keys[:, :rank]
        rope[pl.ds(UNIT * half, UNIT)] = keys[:, rank:]
        return
    swizzled = plgpu.RefType(SWIZZLED)

    @plgpu.inline_mgpu(arg_types=(TAKEN.layout, swizzled, swizzled))
    def issue(_, taken, *places):
        words = [word for quad in taken.registers.flat for word in inline.words(quad)]
        operands = [*(mgpu.utils.memref_ptr(place) for place in places), *words]
        text = _block(_put(latent.dtype, half))
        inline.asm(text, operands, "r," * len(operands) + "~{memory}")

    issue(taken, latent, rope)


def _keys(dtype, columns: int):
    """In the order of ``load``, with two parts in registers at a time."""
    parts = KEYS * columns // PART
    free = parts // 2  # parts whose numbers overwrite no bytes
    yield from _places(columns)
    for part in range(min(2, parts)):
        yield from _load(part)
    for part in range(parts):
        if part == free:
            yield SYNC
        yield from _store(part, dtype)
        if part + 2 < parts:
            yield from _load(part + 2)


def _places(columns: int):
    """Addresses of a thread: a warp has two tiles, of 8 keys and 64 columns, of every part.

    Of a tile a thread has key ``row`` and columns ``16 q`` to ``16 q + 15``: 16 bytes, and two
    units of 16 bytes of numbers, exchanged by the key's number (the swizzle of 128 bytes). Where
    the tiles of a warp lie side by side, odd rows have them in the other order: eight threads,
    two rows, then read and write all banks.
    """
    wide = columns > 64
    yield from (
        *_lane(),
        "shl.b32 x, q, 4;",
        f"mad.lo.u32 in0, row, {columns}, x;",
        "shl.b32 x, q, 1;",
        "xor.b32 x, x, row;",
        "shl.b32 x, x, 4;",
        "mad.lo.u32 out00, row, 128, x;",
    )
    if wide:
        yield from (
            "and.b32 y, row, 1;",
            "mad.lo.u32 in0, y, 64, in0;",
            f"mad.lo.u32 out00, y, {KB}, out00;",
        )
    yield from (
        f"xor.b32 in1, in0, {64 if wide else 512};",
        f"mad.lo.u32 out00, warp, {2 * KB}, out00;",
        f"xor.b32 out10, out00, {KB};",
        f"mul.lo.u32 x, warp, {128 if wide else KB};",
    )
    if wide:  # warps 2 and 3 have the other 8 keys
        yield from ("bfe.u32 y, warp, 1, 1;", f"mad.lo.u32 x, y, {8 * columns - 256}, x;")
    yield f"add.u32 x, x, {KEYS * columns};"
    for i in range(2):
        yield from (f"add.u32 in{i}, in{i}, x;", f"add.u32 in{i}, in{i}, $0;")
        yield f"add.u32 out{i}0, out{i}0, $0;"
        yield f"xor.b32 out{i}1, out{i}0, 16;"


def _four(words: str) -> str:
    return ", ".join(f"{words}{i}" for i in range(4))


def _lane():
    """Of 8 keys and 64 bytes, a thread has key ``row`` and bytes ``16 q`` to ``16 q + 15``.

    Eight threads are two rows: with a pitch of 576 bytes they read all banks, and so they write.
    """
    yield from (
        "mov.u32 x, %tid.x;",
        "bfe.u32 warp, x, 5, 2;",
        "bfe.u32 row, x, 2, 3;",
        "and.b32 q, x, 3;",
    )


def _take():
    count = 4 * TILES
    yield from _lane()
    yield from (
        "mad.lo.u32 row, warp, 8, row;",
        f"mad.lo.u32 in0, row, {64 * TILES}, ${count};",
        "shl.b32 y, q, 4;",
        "add.u32 in0, in0, y;",
    )
    for i in range(TILES):
        four = ", ".join(f"${4 * i + k}" for k in range(4))
        yield f"ld.shared.v4.b32 {{{four}}}, [in0+{64 * i}];"


def _put(dtype, half: int):
    yield from _lane()
    yield from (
        "shl.b32 y, q, 1;",
        "xor.b32 y, y, row;",
        "shl.b32 y, y, 4;",
        "mad.lo.u32 q, row, 128, y;",
    )
    last = TILES - 1
    for i in range(TILES):
        if i in (0, last):
            pitch, base = (KB * last, "$0") if i == 0 else (KB, "$1")
            yield from (
                f"mad.lo.u32 out00, warp, {pitch}, {base};",
                "add.u32 out00, out00, q;",
                "xor.b32 out01, out00, 16;",
            )
        yield from _widen([f"${2 + 4 * i + k}" for k in range(4)], dtype)
        yield from _units(0, 4 * half * KB if i == last else (4 * half * last + i) * KB)


def _load(part: int):
    """Of each of a warp's tiles, the 16 bytes of a thread."""
    for i in range(2):
        words = _four(f"raw{part % 2}{i}")
        yield f"ld.shared.v4.b32 {{{words}}}, [in{i}+{part * PART}];"


def _store(part: int, dtype):
    """Sixteen numbers to two units of 16 bytes, of each of a warp's tiles."""
    for i in range(2):
        yield from _widen([f"raw{part % 2}{i}{k}" for k in range(4)], dtype)
        yield from _units(i, part * 2 * PART)


def _units(tile: int, at: int):
    for k, half in enumerate(("lo", "hi")):
        yield f"st.shared.v4.b32 [out{tile}{k}+{at}], {{{_four(half)}}};"


def _widen(words: Sequence[str], dtype):
    """16 e4m3 in four registers to 16 numbers in ``lo`` and ``hi``.

    The chip knows e4m3 to float16; bfloat16 takes the way through float32, exact as well.
    """
    for i, word in enumerate(words):
        yield f"mov.b32 {{h0, h1}}, {word};"
        for k in range(2):
            to = f"{'hi' if i > 1 else 'lo'}{2 * (i % 2) + k}"
            yield f"cvt.rn.f16x2.e4m3x2 {to}, h{k};"
            if dtype == jnp.bfloat16:
                yield f"mov.b32 {{h2, h3}}, {to};"
                yield "cvt.f32.f16 f0, h2;"
                yield "cvt.f32.f16 f1, h3;"
                yield f"cvt.rn.bf16x2.f32 {to}, f1, f0;"


def _block(lines: Iterable[str]) -> str:
    words = ", ".join(_four(k) for k in ("raw00", "raw01", "raw10", "raw11", "lo", "hi"))
    places = "in0, in1, out00, out01, out10, out11"
    head = [f".reg .b32 x, y, warp, row, q, {places}, {words};", ".reg .b16 h<4>;"]
    return "\n".join(("{", *head, ".reg .f32 f<2>;", *lines, "}"))
