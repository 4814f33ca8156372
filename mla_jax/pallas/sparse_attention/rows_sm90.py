"""Selected rows of a cache to the tiles of the products, by a warpgroup: texts of its assembly.

A tile is 8 keys by 64 columns in 16 bits, swizzled by 128 bytes. Of a unit of 32 keys a warp has 8.
*Records* go by way of registers. Of a key and 64 columns four threads have 16 codes each::

    slot -> address of the row, or 0 -> load -> e4m3 * scale -> bfloat16 -> two times 16 bytes

so a load of a warp takes 64 bytes in a row of each of its keys, and a store reaches all banks. A
row that is not there (slot -1, or outside of the cache) is never read: its registers are zeros.
*Elements* are copied by ``cp.async``, 16 bytes of each of eight threads for a key and 64 columns;
of a row that is not there it writes zeros.

``code * scale`` is rounded once, from float32; a NaN stays one. Addresses have 64 bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mla_jax.cache import RECORD_FORMATS
from mla_jax.types import cdiv

__all__ = ["BLOCK", "Scope", "Tile", "tiles_of"]

BLOCK = 64  # keys of one step
UNIT = 32  # keys that a warpgroup widens at once
LINE = 128  # bytes that are fetched to the L2 cache at once
LEFT, RIGHT, ROPE = range(3)


@dataclass(frozen=True, kw_only=True)
class Tile:
    """64 columns of a row."""

    byte: int  # of the row, where they begin
    group: int | None  # number of their scale; None: 16-bit elements
    place: int  # LEFT, RIGHT or ROPE
    number: int  # of the tile there


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where the rows of one cache lie. Sizes are bytes."""

    format: str
    page: int  # rows
    page_bytes: int
    pages: int  # of each layer
    layers: int  # of a stack; 0: the cache of one layer
    width: int  # elements of a row
    keys: int  # entries of each token's list

    @property
    def slots(self) -> int:
        """Of each layer."""
        return self.pages * self.page

    @property
    def row_bytes(self) -> int:
        """From one row of a page to the next."""
        record = RECORD_FORMATS.get(self.format)
        return record.widths[0] if record else 2 * self.width

    @property
    def flat(self) -> bool:
        """Rows of neighbouring pages follow each other."""
        return self.page_bytes == self.page * self.row_bytes

    @property
    def blocks(self) -> int:
        """Blocks of 64 keys in a list."""
        return cdiv(self.keys, BLOCK)


def tiles_of(format: str, width: int) -> tuple[Tile, ...]:
    """The tiles of a row, in the order of its columns."""
    record = RECORD_FORMATS.get(format)
    tiles, byte = [], 0
    for i in range(width // 64):
        place = (LEFT, RIGHT, ROPE)[i // 4]
        coded = record is not None and i < record.values[0].count // 64
        group = None
        if record is not None and coded:
            scales = record.field(record.values[0].scale)
            group = i * 64 // (record.values[0].count // scales.count)
        elif record is not None:
            byte = record.field(record.values[1].name).offset
        tiles.append(Tile(byte=byte, group=group, place=place, number=i % 4))
        byte += 64 if coded else 128
    return tuple(tiles)


def block(lines: Iterator[str]) -> str:
    """Assembly with the registers that all of these texts use."""
    head = (
        ".reg .pred p, q;",
        ".reg .b32 x, y, z, warp, row, lane, t<8>;",
        ".reg .b16 h<4>;",
        ".reg .f32 f<2>;",
        ".reg .b64 a, b;",
    )
    return "\n".join(("{", *head, *lines, "}"))


def _lane() -> Iterator[str]:
    """Of 32 keys a thread has key ``8 warp + row``, quarter ``lane`` of its 64 columns."""
    yield from (
        "mov.u32 x, %tid.x;",
        "bfe.u32 warp, x, 5, 2;",
        "bfe.u32 row, x, 2, 3;",
        "and.b32 lane, x, 3;",
    )


def _wide_lane() -> Iterator[str]:
    """Of 16 keys of a warp a thread has keys ``row + 4 k``, eighth ``lane`` of their 64 columns."""
    yield from (
        "mov.u32 x, %tid.x;",
        "bfe.u32 warp, x, 5, 2;",
        "bfe.u32 row, x, 3, 2;",
        "and.b32 lane, x, 7;",
    )


def look_up(which: str) -> Iterator[str]:
    """Entries of a list for a thread's keys; -1 behind its end.

    ``$0`` the entry (``$0`` to ``$3`` of ``block``); then the list's address, the number of the
    first key, how many entries there are. ``which``: ``unit`` of 32 keys, ``block`` of 64 as
    ``_wide_lane`` has them, or ``row``: thread ``i`` has key ``i`` modulo 64.
    """
    count = 4 if which == "block" else 1
    if which == "row":
        yield from ("mov.u32 x, %tid.x;", "and.b32 row, x, 63;")
    elif which == "unit":
        yield from _lane()
        yield "mad.lo.u32 row, warp, 8, row;"
    else:
        yield from _wide_lane()
        yield "mad.lo.u32 row, warp, 16, row;"
    yield f"add.u32 row, row, ${count + 1};"
    for k in range(count):
        yield f"setp.lt.u32 p, row, ${count + 2};"
        yield f"mad.wide.u32 a, row, 4, ${count};"
        yield f"mov.b32 ${k}, -1;"
        yield f"@p ld.global.nc.b32 ${k}, [a+0];"
        if k + 1 < count:
            yield "add.u32 row, row, 4;"


def find(scope: Scope) -> Iterator[str]:
    """``$0`` where a row begins, ``$1`` where its scales do, or 0 and 0: there is no such row.

    Given ``$2`` the slot, ``$3`` where the layer begins.
    """
    record = RECORD_FORMATS.get(scope.format)
    yield f"setp.lt.u32 p, $2, {scope.slots};"
    if scope.flat:
        yield f"mad.wide.u32 a, $2, {scope.row_bytes}, $3;"
    else:
        yield from (
            f"div.u32 y, $2, {scope.page};",
            f"mul.lo.u32 z, y, {scope.page};",
            "sub.u32 z, $2, z;",
            f"mad.wide.u32 b, y, {scope.page_bytes}, $3;",
            f"mad.wide.u32 a, z, {scope.row_bytes}, b;",
        )
    if record is None:
        yield "mov.b64 b, a;"
    elif scope.flat:
        yield f"add.u64 b, a, {record.field(record.values[0].scale).offset};"
    else:
        yield f"mad.wide.u32 b, z, {record.widths[1]}, b;"
        yield f"add.u64 b, b, {scope.page * scope.row_bytes};"
    yield "selp.b64 $0, a, 0, p;"
    yield "selp.b64 $1, b, 0, p;"


def spread(format: str) -> Iterator[str]:
    """``$0`` a thread's first codes of the record at ``$2``, ``$1`` its rotary elements."""
    record = RECORD_FORMATS[format]
    yield from _lane()
    yield "mad.wide.u32 $0, lane, 16, $2;"
    yield "mad.wide.u32 a, lane, 32, $2;"
    yield f"add.u64 $1, a, {record.field(record.values[1].name).offset};"


def load(byte: int, words: int = 4) -> Iterator[str]:
    """``$0`` to ``$3`` from address ``$4`` and ``byte`` on; zeros if the row, ``$5``, is none."""
    yield "setp.ne.u64 p, $5, 0;"
    for k in range(4):
        yield f"mov.b32 ${k}, 0;"
    found = ", ".join(f"${k}" for k in range(words))
    yield f"@p ld.global.nc.v{words}.b32 {{{found}}}, [$4+{byte}];"


def targets() -> Iterator[str]:
    """Where a thread stores: ``$0`` left, ``$1`` right, ``$2`` rotary, of places ``$3`` to ``$5``.

    Of a key's 64 columns it has units ``2 lane`` and ``2 lane + 1`` of 16 bytes, exchanged by the
    key's number (the swizzle of 128 bytes): the second one is the first, with bit 4 changed.
    """
    yield from _lane()
    yield from (
        "shl.b32 y, lane, 1;",
        "xor.b32 y, y, row;",
        "shl.b32 y, y, 4;",
        "mad.lo.u32 y, row, 128, y;",
        "mad.lo.u32 z, warp, 4096, y;",
        "add.u32 $0, z, $3;",
        "add.u32 $1, z, $4;",
        "mad.lo.u32 z, warp, 1024, y;",
        "add.u32 $2, z, $5;",
    )


def offset_of(tile: Tile, half: int) -> int:
    """From a thread's target to the same of a tile of keys ``32 half`` on."""
    pitch = 1 if tile.place == ROPE else 4
    return 1024 * (UNIT // 8 * half * pitch + tile.number)


def scale(format: str, group: int) -> Iterator[str]:
    """``$0``: bits of the float32 scale of a group; ``$1`` to ``$4`` are the scales of a row."""
    if RECORD_FORMATS[format].field(RECORD_FORMATS[format].values[0].scale).dtype == "float32":
        yield f"mov.b32 $0, ${1 + group};"
        return
    yield from (  # E8M0: 2^(x - 127); 0 is 2^-127, which is subnormal, and 255 is no number
        f"bfe.u32 x, ${1 + group // 4}, {8 * (group % 4)}, 8;",
        "shl.b32 y, x, 23;",
        "setp.eq.u32 p, x, 0;",
        "selp.b32 y, 4194304, y, p;",
        "setp.eq.u32 p, x, 255;",
        "selp.b32 $0, 2143289344, y, p;",
    )


def store_codes(offset: int) -> Iterator[str]:
    """Sixteen codes ``$1`` to ``$4`` times ``$5`` to the target ``$0``, as bfloat16."""
    for i in range(4):
        yield f"mov.b32 {{h0, h1}}, ${1 + i};"
        for k in range(2):
            yield f"cvt.rn.f16x2.e4m3x2 x, h{k};"
            yield "mov.b32 {h2, h3}, x;"
            for n in range(2):
                yield f"cvt.f32.f16 f{n}, h{2 + n};"
                yield f"mul.f32 f{n}, f{n}, $5;"
            yield f"cvt.rn.bf16x2.f32 t{2 * i + k}, f1, f0;"
    yield from _store([f"t{i}" for i in range(8)], offset)


def store_elements(offset: int) -> Iterator[str]:
    """Sixteen elements ``$1`` to ``$8`` to the target ``$0``."""
    yield from _store([f"${1 + i}" for i in range(8)], offset)


def _store(words: Sequence[str], offset: int) -> Iterator[str]:
    yield f"st.shared.v4.b32 [$0+{offset}], {{{', '.join(words[:4])}}};"
    yield "xor.b32 y, $0, 16;"
    yield f"st.shared.v4.b32 [y+{offset}], {{{', '.join(words[4:])}}};"


def mark(half: int) -> Iterator[str]:
    """Whether each key of a unit is there, 1 or 0, to float32 ``$0``; ``$1`` is its row."""
    yield from _lane()
    yield from (
        "mad.lo.u32 row, warp, 8, row;",
        "mad.lo.u32 y, row, 4, $0;",
        "setp.ne.u64 p, $1, 0;",
        "selp.b32 z, 1065353216, 0, p;",
        "setp.eq.u32 q, lane, 0;",
        f"@q st.shared.b32 [y+{4 * UNIT * half}], z;",
    )


def copy(tiles: Sequence[Tile], k: int) -> Iterator[str]:
    """Key ``row + 4 k`` of a warp's 16: its tiles, and whether it is there.

    ``$0`` to ``$2`` are the places left, right and rotary, ``$3`` that of the marks, ``$4`` the
    row, ``$5`` any address that exists.
    """
    yield from _wide_lane()
    yield from (
        f"add.u32 row, row, {4 * k};",
        "setp.ne.u64 p, $4, 0;",
        "selp.b64 a, $4, $5, p;",
        "selp.b32 t0, 16, 0, p;",  # bytes that are read
        "mad.wide.u32 a, lane, 16, a;",
        "mad.lo.u32 x, warp, 16, row;",
        "mad.lo.u32 y, x, 4, $3;",
        "selp.b32 z, 1065353216, 0, p;",
        "setp.eq.u32 q, lane, 0;",
        "@q st.shared.b32 [y+0], z;",
        "and.b32 row, x, 7;",
        "bfe.u32 x, x, 3, 3;",
        "xor.b32 y, lane, row;",
        "shl.b32 y, y, 4;",
        "mad.lo.u32 y, row, 128, y;",
        "mad.lo.u32 z, x, 4096, y;",
        "add.u32 t1, z, $0;",
        "add.u32 t2, z, $1;",
        "mad.lo.u32 z, x, 1024, y;",
        "add.u32 t3, z, $2;",
    )
    for tile in tiles:
        to = f"[t{1 + tile.place}+{1024 * tile.number}]"
        yield f"cp.async.cg.shared.global {to}, [a+{tile.byte}], 16, t0;"


def fetch(row_bytes: int, *, apart: bool) -> Iterator[str]:
    """The lines of row ``$0`` to the L2 cache; and its scales, ``$1``, if apart.

    Threads ``i`` and ``i + 64`` have one row, and every other of its lines each. One instruction
    for a whole row (``cp.async.bulk.prefetch``) takes its address from a register that a warp
    shares, so the assembler writes a loop over the threads: a fifth of the kernel's time.
    """
    yield from (
        "mov.u32 x, %tid.x;",
        "bfe.u32 x, x, 6, 1;",
        "setp.ne.u64 p, $0, 0;",
        f"mad.wide.u32 a, x, {LINE}, $0;",
    )
    lines = cdiv(row_bytes, LINE)
    for k in range(0, lines - 1, 2):
        yield f"@p prefetch.global.L2 [a+{k * LINE}];"
    yield "setp.eq.u32 q, x, 0;"
    yield "and.pred p, p, q;"
    if lines % 2:  # the other thread has none beside it
        yield f"@p prefetch.global.L2 [a+{(lines - 1) * LINE}];"
    if apart:
        yield "@p prefetch.global.L2 [$1+0];"
