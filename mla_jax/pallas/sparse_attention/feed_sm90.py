"""Keys for ``mosaic_sm90``: selected rows to shared memory, in 16 bits, block after block.

*Records* have a warpgroup that does nothing else. They are fetched to the L2 cache ``AHEAD`` blocks
early, entries of the lists are read one block before that. They come in units of 32 keys; while one
is widened from a thread's registers the next one is loaded into them::

  registers    u0 | widen u0, load u1 | widen u1, load u2 | ...
  slot              `-- keys 0..31        `-- keys 32..63 -> full -> scores

*Elements* are copied into the slot itself, by the warpgroup that multiplies queries with them
(``pair_sm90``). They are not fetched to the L2 cache first: with that the kernel was slower. A slot
is freed and filled in two parts: its first columns are copied while the others are in use still.

``rows_sm90`` has the assembly; the interpreter, which knows none, reads the same rows by
``formats``.

A list has no more than its entries, a cache no more than its rows: everything else is no row. Its
key is zeros, and ``marks`` says so to the scores.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import RECORD_FORMATS
from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_inline import arith
from mla_jax.pallas.sparse_attention import rows_sm90 as rows
from mla_jax.pallas.sparse_attention.rows_sm90 import BLOCK, LEFT, RIGHT, UNIT, Scope

__all__ = ["MARKS", "SLOTS", "Feed", "parts_of"]

SLOTS = 2  # blocks of keys in shared memory
MARKS = 4  # blocks whose marks are kept: those of the next one are written before its keys
AHEAD = 2  # blocks that records are fetched to the L2 cache before they are read
PARTS = 2  # in which a slot of elements is freed and filled

I32 = jnp.int32
SWIZZLED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
PLAIN = plgpu.RefType()


def parts_of(format: str) -> int:
    """In how many parts a slot is freed."""
    return 1 if format in RECORD_FORMATS else PARTS


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The blocks of one worker, where their rows are, and where their keys go."""

    scopes: tuple[Scope, ...]
    lists: Sequence[Any]  # [tokens, keys] of each scope
    pages: Sequence[Any]  # bytes or elements of all layers
    layers: Sequence[Any]  # the layer's number in each
    start: Any  # first block on the line of all blocks
    stop: Any
    keys: tuple[Any, Any]  # left and right columns, [slot, 64, 256]
    rotary: Any  # [slot, 64, 64]: columns behind those
    marks: Any  # [MARKS, 64]
    full: Any  # of records
    freed: Any  # [SLOTS * parts]
    simulate: bool

    @property
    def format(self) -> str:
        """Of the rows of all scopes."""
        return self.scopes[0].format

    @property
    def blocks(self) -> int:
        """Of a token, in all scopes."""
        return sum(scope.blocks for scope in self.scopes)

    def run(self) -> None:
        """Feed all blocks of records."""
        if self.simulate:
            self._run_plainly()
        else:
            self._run_records()
        count = self.stop - self.start
        for k in range(SLOTS, 0, -1):
            pl.when(count >= k)(lambda k=k: self.await_freed(count - k))

    def await_freed(self, g) -> None:
        """Until what was block ``g`` is freed."""
        for part in range(parts_of(self.format)):
            self._await_part(g, part)

    def _await_part(self, g, part: int) -> None:
        plgpu.barrier_wait(self.freed.at[_ring(g) * parts_of(self.format) + part])

    def _wait(self, g) -> None:
        pl.when(g >= SLOTS)(lambda: self.await_freed(g))

    def _publish(self, g) -> None:
        lib.fence(simulate=self.simulate)
        plgpu.barrier_arrive(self.full.at[_ring(g)])

    def _place(self, e):
        """Token, scope and first entry of block ``e`` of the line."""
        token = lax.div(e, I32(self.blocks))
        at = e - token * self.blocks
        if len(self.scopes) == 1:
            return token, I32(0), at * BLOCK
        first = self.scopes[0].blocks
        second = (at >= first).astype(I32)
        return token, second, (at - second * first) * BLOCK

    def _run_plainly(self) -> None:
        def step(e, carry):
            g = e - self.start
            found, there = self._read_plainly(e)
            self._wait(g)
            self._write_plainly(_ring(g), lax.rem(g, I32(MARKS)), found, there)
            self._publish(g)
            return carry

        lax.fori_loop(self.start, self.stop, step, 0)

    def _read_plainly(self, e) -> tuple[jax.Array, jax.Array]:
        """The rows of block ``e``, and which of them there are: for the interpreter."""
        record = RECORD_FORMATS.get(self.format)

        def values(i: int):
            scope, pages = self.scopes[i], self.pages[i][...]
            if record is not None:
                parts = record.decode(record.split(pages, page=scope.page), dtype=self.rotary.dtype)
                pages = jnp.concatenate(parts, axis=-1)
            pages = pages.reshape(scope.layers or 1, scope.slots, scope.width)
            return lax.dynamic_index_in_dim(pages, self.layers[i], keepdims=False)

        def read(i: int, token, first):
            scope = self.scopes[i]
            entry = first + lax.iota(I32, BLOCK)
            slot = jnp.take(self.lists[i][token], jnp.minimum(entry, scope.keys - 1))
            there = (entry < scope.keys) & (slot >= 0) & (slot < scope.slots)
            found = jnp.take(values(i), jnp.where(there, slot, 0), axis=0)
            return jnp.where(there[:, None], found, jnp.zeros_like(found)), there

        token, second, first = self._place(e)
        found, there = read(0, token, first)
        if len(self.scopes) > 1:
            more = read(1, token, first)
            found, there = (
                jnp.where(second == 1, b, a) for a, b in zip((found, there), more, strict=True)
            )
        return found, there

    def _write_plainly(self, s, mark, found, there) -> None:
        half = self.keys[0].shape[-1]
        for i, place in enumerate(self.keys):
            place[s] = found[:, i * half : (i + 1) * half]
        if found.shape[1] > 2 * half:
            self.rotary[s] = found[:, 2 * half :]
        self.marks[mark] = there.astype(jnp.float32)

    def _run_records(self) -> None:
        def step(e, carry):
            words, other, following, early = carry
            g = e - self.start
            s, mark = _ring(g), lax.rem(g, I32(MARKS))
            self._wait(g)
            words = self._step(words, other, self._place(e)[1], s, mark, 0)
            other = self._look_up("unit", e + 1, UNIT)
            next_mark = lax.rem(g + 1, I32(MARKS))
            words = self._step(words, following, self._place(e + 1)[1], s, next_mark, 1)
            following = self._look_up("unit", e + 2)
            self._publish(g)
            self._fetch(early, e + AHEAD)
            return words, other, following, self._look_up("row", e + AHEAD + 1)

        e = self.start
        self._fetch(self._look_up("row", e), e)
        self._fetch(self._look_up("row", e + 1), e + 1)
        words = self._step(None, self._look_up("unit", e), self._place(e)[1], 0, 0, 1)
        carry = (
            words,
            self._look_up("unit", e, UNIT),
            self._look_up("unit", e + 1),
            self._look_up("row", e + AHEAD),
        )
        lax.fori_loop(self.start, self.stop, step, carry)

    def entries(self, e) -> jax.Array | None:
        """Of block ``e``, in the registers of the warpgroup that will copy its rows."""
        return None if self.simulate else self._look_up("block", e)

    def begin(self, entries, e) -> None:
        """Begin to copy the rows of block ``e``, elements, part by part, as its slot is freed."""
        g = e - self.start
        s = _ring(g)
        tiles = rows.tiles_of(self.format, self.scopes[0].width)
        # The first product of each half of the values reads its first two tiles.
        first = [tile for tile in tiles if tile.place in (LEFT, RIGHT) and tile.number < 2]
        for part, some in enumerate((first, [tile for tile in tiles if tile not in first])):
            pl.when(g >= SLOTS)(lambda part=part: self._await_part(g, part))
            if not self.simulate:
                self._copy(entries, self._place(e)[1], s, some)
                lib.issue("cp.async.commit_group;")
        if self.simulate:
            self._write_plainly(s, s, *self._read_plainly(e))

    def finish(self, part: int) -> None:
        """What this warpgroup began to copy is there for its products, up to this part."""
        if not self.simulate:
            lib.issue(f"cp.async.wait_group {PARTS - 1 - part};")
        plgpu.commit_smem()

    def _look_up(self, which: str, e, more: int = 0) -> jax.Array:
        """Entries of block ``e`` for a thread, from key ``more`` on; -1 behind the last block."""
        count = 4 if which == "block" else 1
        token, second, first = self._place(e)
        inside = e < self.stop
        token = jnp.where(inside, token, 0)
        sizes = [scope.keys for scope in self.scopes]
        entries = jnp.where(second == 1, sizes[-1], sizes[0])
        entries = jnp.where(inside, entries, 0)
        n = len(self.lists)
        layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=count)

        @plgpu.inline_mgpu(
            arg_types=(PLAIN,) * n + (inline.SCALAR,) * 4,
            return_type=plgpu.ShapeDtypeStruct((128 * count,), I32, layout=layout),
        )
        def read(_, *given):

            token, first, entries, second = (x.registers.item() for x in given[n:])
            begin = [
                inline.address(ref, arith.muli(inline.wide(token), inline.constant(4 * size, 64)))
                for ref, size in zip(given[:n], sizes, strict=True)
            ]
            text = rows.block(rows.look_up(which))
            operands = [_of_scope(second, begin), first, entries]
            kind = f"struct<({', '.join(['i32'] * count)})>" if count > 1 else "i32"
            found = inline.asm(text, operands, "=&r," * count + "l,r,r", result=kind)
            return inline.strided(
                inline.unpacked(found, count) if count > 1 else [found], vector=count
            )

        return read(*self.lists, token, first + more, entries, second)

    def _find(self, slot, refs, layers, second, *, extra: int):
        """Addresses of a row and of its scales, 0 if there is none; or of ``extra``, the base."""

        found, bases = [], []
        for scope, ref, layer in zip(self.scopes, refs, layers, strict=True):
            size = inline.constant(scope.pages * scope.page_bytes, 64)
            base = inline.address(ref, arith.muli(inline.wide(layer), size))
            text = rows.block(rows.find(scope))
            both = inline.asm(text, [slot, base], "=&l,=&l,r,l", result="struct<(i64, i64)>")
            found.append(inline.unpacked(both, 2, bits=64))
            bases.append(base)
        row, scales = (_of_scope(second, list(x)) for x in zip(*found, strict=True))
        return (row, scales, _of_scope(second, bases))[: 2 + extra]

    def _step(self, words, slots, second, s, mark, half: int):
        """Widen the unit in ``words`` as keys ``32 half`` on, if any; load that of ``slots``.

        ``second`` is the scope of the latter, whose marks are those of block ``mark`` modulo
        ``MARKS``, at the other half of it.
        """
        n, tiles = len(self.pages), rows.tiles_of(self.format, self.scopes[0].width)
        count = sum(8 if tile.group is None else 4 for tile in tiles) + 4
        taken = plgpu.ShapeDtypeStruct(
            (128 * count,), I32, layout=plgpu.Layout.WG_STRIDED((128 * count,), vec_size=4)
        )
        begin = words is None
        slot = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        kinds = (
            *(() if begin else (taken.layout,)),
            slot,
            *(SWIZZLED,) * 3,
            PLAIN,
            *(PLAIN,) * n,
            *(inline.SCALAR,) * (n + 1),
        )

        @plgpu.inline_mgpu(arg_types=kinds, return_type=taken)
        def issue(_, *given):
            rest = list(given)
            held = [] if begin else [w for r in rest.pop(0).registers.flat for w in inline.words(r)]
            (slot,) = (w for r in rest.pop(0).registers.flat for w in inline.words(r))
            *places, marks = (mgpu.utils.memref_ptr(rest.pop(0)) for _ in range(4))
            refs = [rest.pop(0) for _ in range(n)]
            *layers, second = (x.registers.item() for x in rest)
            row, scales = self._find(slot, refs, layers, second, extra=0)
            inline.asm(rows.block(rows.mark(1 - half)), [marks, row], "r,l,~{memory}")
            both = inline.asm(
                rows.block(rows.spread(self.format)),
                [row],
                "=&l,=&l,l",
                result="struct<(i64, i64)>",
            )
            codes, rotary = inline.unpacked(both, 2, bits=64)
            factors, targets = held[-4:], []
            if not begin:
                text = rows.block(rows.targets())
                found = inline.asm(
                    text, places, "=&r,=&r,=&r,r,r,r", result="struct<(i32, i32, i32)>"
                )
                targets = inline.unpacked(found, 3)

            def load(address, byte, words=4):
                text, kind = rows.block(rows.load(byte, words)), "struct<(i32, i32, i32, i32)>"
                found = inline.asm(text, [address, row], "=&r,=&r,=&r,=&r,l,l", result=kind)
                return inline.unpacked(found, 4)

            loaded = []
            for tile in tiles:
                size = 8 if tile.group is None else 4
                own, at = held[len(loaded) : len(loaded) + size], rows.offset_of(tile, half)
                if tile.group is None:
                    if not begin:
                        text = rows.block(rows.store_elements(at))
                        inline.asm(text, [targets[tile.place], *own], "r," * 9 + "~{memory}")
                    loaded += [*load(rotary, 0), *load(rotary, 16)]
                    continue
                if not begin:
                    text = rows.block(rows.scale(self.format, tile.group))
                    scale = inline.asm(text, factors, "=&r,r,r,r,r", result="i32")
                    text = rows.block(rows.store_codes(at))
                    inline.asm(text, [targets[tile.place], *own, scale], "r," * 6 + "~{memory}")
                loaded += load(codes, tile.byte)
            scale_words = 4 if self.scopes[0].flat else 2
            return inline.strided([*loaded, *load(scales, 0, scale_words)], vector=4)

        places = [self.keys[LEFT].at[s], self.keys[RIGHT].at[s], self.rotary.at[s]]
        held = () if begin else (words,)
        return issue(*held, slots, *places, self.marks.at[mark], *self.pages, *self.layers, second)

    def _copy(self, slots, second, s, tiles: Sequence[rows.Tile]) -> None:
        """Begin to copy tiles of a block's rows to slot ``s``; say which rows there are."""
        n = len(self.pages)
        layout = plgpu.Layout.WG_STRIDED((512,), vec_size=4)
        kinds = layout, *(SWIZZLED,) * 3, PLAIN, *(PLAIN,) * n, *(inline.SCALAR,) * (n + 1)

        @plgpu.inline_mgpu(arg_types=kinds)
        def issue(_, slots, *given):
            found = [w for r in slots.registers.flat for w in inline.words(r)]
            places = [mgpu.utils.memref_ptr(ref) for ref in given[:4]]
            *layers, second = (x.registers.item() for x in given[4 + n :])
            for k, slot in enumerate(found):
                row, _, base = self._find(slot, given[4 : 4 + n], layers, second, extra=1)
                text = rows.block(rows.copy(tiles, k))
                inline.asm(text, [*places, row, base], "r,r,r,r,l,l,~{memory}")

        places = [self.keys[LEFT].at[s], self.keys[RIGHT].at[s], self.rotary.at[s]]
        issue(slots, *places, self.marks.at[s], *self.pages, *self.layers, second)

    def _fetch(self, slots, e) -> None:
        """Rows of block ``e`` to the L2 cache."""
        n = len(self.pages)
        layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        kinds = layout, *(PLAIN,) * n, *(inline.SCALAR,) * (n + 1)

        @plgpu.inline_mgpu(arg_types=kinds)
        def issue(_, slots, *given):
            (slot,) = (w for r in slots.registers.flat for w in inline.words(r))
            *layers, second = (x.registers.item() for x in given[n:])
            row, scales = self._find(slot, given[:n], layers, second, extra=0)
            apart = not self.scopes[0].flat
            text = rows.block(rows.fetch(self.scopes[0].row_bytes, apart=apart))
            inline.asm(text, [row, scales], "l,l")

        issue(slots, *self.pages, *self.layers, self._place(e)[1])


def _ring(g):
    return lax.rem(I32(g), I32(SLOTS))


def _of_scope(second, values: Sequence[Any]) -> Any:
    """The first of the values, or the last one if ``second`` is not 0."""

    if len(values) == 1:
        return values[0]
    chosen = arith.cmpi(arith.CmpIPredicate.ne, second, inline.constant(0))
    return arith.select(chosen, values[1], values[0])
