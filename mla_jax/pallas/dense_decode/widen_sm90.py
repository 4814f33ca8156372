"""e4m3 keys to the 16-bit tiles of the products, in shared memory of a Hopper block.

``take`` and ``put`` go by way of registers, ``keys`` and ``rest`` widen in place. There half a
slot is 64 keys x 256 columns of 16 bits: 4 KB for every 8 keys, four swizzled tiles of 64
columns. Warp ``w`` converts keys ``16 w`` to ``16 w + 15``, whose 8 KB are, in kilobytes::

          0     1     2     3     4     5     6     7
  before  rope  .     .     .     a0    b0    a1    b1    a, b: columns 0..127, 128..255
  after   a0    a0    b0    b0    a1    a1    b1    b1    0, 1: keys 0..7, 8..15

In the order a0, b0, a1, b1 no step overwrites what a later one reads, so a warp waits for itself
alone. The right half carries the rotary columns of the block too. They go to a buffer that is
free after the products of a block before, so ``keys`` parks them, and ``rest`` takes them and b1.

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

__all__ = ["GROUP", "STORED", "keys", "put", "raw", "raw_rope", "rest", "take"]

GROUP = 16
"""Keys of one warp, and rows of one copy."""

WARPS = 4
STORED = jnp.float8_e4m3fn
KB = 1024
ROPE, A0, B0, A1, B1 = 0, 4 * KB, 5 * KB, 6 * KB, 7 * KB  # where the bytes are
TO = {A0: 0, B0: 2 * KB, A1: 4 * KB, B1: 6 * KB, ROPE: 0}  # where the keys go
PARKED = 6 * KB  # rotary columns, after a1 and before b1
UNIT, TILES = 32, 9  # rows of ``take``, and their tiles of 64 columns
WORDS = UNIT * TILES * 16
TAKEN = plgpu.ShapeDtypeStruct(
    (WORDS,), jnp.int32, layout=plgpu.Layout.WG_STRIDED((WORDS,), vec_size=4)
)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SYNC = "bar.warp.sync -1;"


def raw(slots: int, columns: int) -> plgpu.SMEM:
    """The bytes of a ring of half slots: ``[slot, warp, 1]`` takes 16 keys."""
    return _bytes(slots, WARPS, 2, GROUP, columns)


def raw_rope(slots: int, columns: int) -> plgpu.SMEM:
    """Rotary columns in the same ring: ``[slot, warp, 0]`` takes 16 keys."""
    return _bytes(slots, WARPS, 8 * KB // (GROUP * columns), GROUP, columns)


def _bytes(*shape: int) -> plgpu.SMEM:
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
    return plgpu.SMEM(shape, STORED, transforms=transforms)


def keys(slot, stored, *, right: bool, simulate: bool) -> None:
    """Bytes of one half slot to keys; in the right half all but ``rest``. Does not publish."""
    if simulate:
        for w in range(WARPS):
            slot[pl.ds(w * GROUP, GROUP)] = stored[w, 1].astype(slot.dtype)
        return
    _assemble(_keys(slot.dtype, right), slot)


def rest(slot, rope, stored_rope, *, simulate: bool) -> None:
    """What ``keys`` left of a right half, and its rotary columns to ``rope``."""
    if simulate:
        for w in range(WARPS):
            rope[pl.ds(w * GROUP, GROUP)] = stored_rope[w, 0].astype(rope.dtype)
        return
    _assemble(_rest(slot.dtype), slot, rope)


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
        return inline.strided(found, count, vector=4)

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


def _keys(dtype, right: bool):
    yield from _places("$0", 8 * KB)
    if right:
        yield from _load("rope", ROPE)
    for tile in (A0, B0, A1) if right else (A0, B0, A1, B1):
        yield from (*_load("raw", tile), SYNC, *_store("raw", tile, dtype))
    if right:
        yield from _park("rope")


def _rest(dtype):
    yield from (*_places("$0", 8 * KB), *_load("rope", PARKED))
    yield from (*_load("raw", B1), SYNC, *_store("raw", B1, dtype))
    yield from (*_places("$1", 2 * KB), *_store("rope", ROPE, dtype))


def _places(base: str, pitch: int):
    """Addresses of a thread in the ``pitch`` bytes of its warp.

    Of a tile of 8 keys and 64 columns it has key ``row`` and columns ``16 q`` to ``16 q + 15``.
    Units of 16 bytes are exchanged by the key's number: the swizzles of 64 and 128 bytes.
    """
    yield from (
        "mov.u32 x, %tid.x;",
        "bfe.u32 y, x, 5, 2;",
        f"mad.lo.u32 warp, y, {pitch}, {base};",
        "and.b32 row, x, 7;",
        "bfe.u32 q, x, 3, 2;",
        "bfe.u32 y, x, 1, 2;",
        "xor.b32 y, y, q;",
        "shl.b32 y, y, 4;",
        "mad.lo.u32 in, row, 64, y;",
        "add.u32 in, in, warp;",
        "shl.b32 y, q, 1;",
        "xor.b32 y, y, row;",
        "shl.b32 y, y, 4;",
        "mad.lo.u32 out0, row, 128, y;",
        "add.u32 out0, out0, warp;",
        "xor.b32 out1, out0, 16;",
    )


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
        f"mad.lo.u32 in, row, {64 * TILES}, ${count};",
        "shl.b32 y, q, 4;",
        "add.u32 in, in, y;",
    )
    for i in range(TILES):
        four = ", ".join(f"${4 * i + k}" for k in range(4))
        yield f"ld.shared.v4.b32 {{{four}}}, [in+{64 * i}];"


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
                f"mad.lo.u32 out0, warp, {pitch}, {base};",
                "add.u32 out0, out0, q;",
                "xor.b32 out1, out0, 16;",
            )
        yield from _widen([f"${2 + 4 * i + k}" for k in range(4)], dtype)
        yield from _units(4 * half * KB if i == last else (4 * half * last + i) * KB)


def _load(words: str, at: int):
    """Of each of two tiles of 64 columns, the 16 bytes of a thread."""
    for i in range(2):
        yield f"ld.shared.v4.b32 {{{_four(f'{words}{i}')}}}, [in+{at + i * 512}];"


def _park(words: str):
    for i in range(2):
        yield f"st.shared.v4.b32 [in+{PARKED + i * 512}], {{{_four(f'{words}{i}')}}};"


def _store(words: str, tile: int, dtype):
    """Sixteen numbers to two units of 16 bytes, of each tile of 64 columns."""
    for i in range(2):
        yield from _widen([f"{words}{i}{k}" for k in range(4)], dtype)
        yield from _units(TO[tile] + i * KB)


def _units(at: int):
    for k, half in enumerate(("lo", "hi")):
        yield f"st.shared.v4.b32 [out{k}+{at}], {{{_four(half)}}};"


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
    words = ", ".join(_four(k) for k in ("raw0", "raw1", "rope0", "rope1", "lo", "hi"))
    head = [f".reg .b32 x, y, warp, row, q, in, out0, out1, {words};", ".reg .b16 h<4>;"]
    return "\n".join(("{", *head, ".reg .f32 f<2>;", *lines, "}"))


def _assemble(lines: Iterable[str], *refs) -> None:
    text = _block(lines)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED),) * len(refs))
    def issue(_, *places):
        at = [mgpu.utils.memref_ptr(place) for place in places]
        inline.asm(text, at, "r," * len(places) + "~{memory}")

    issue(*refs)
