"""Merge the pieces of split requests, in place, and fill the rows of padding tokens.

Computes ``merge.ref`` over the pieces of each row, base 2, float32. The tokens that need it are
a list at the head of ``WorkPlan.merges``; a fixed number of thread blocks walk its rows::

    top = max_p lse_p         out = sum_p 2^(lse_p - top) part_p / sum_p 2^(lse_p - top)

A head may have a sink, one more key of value zero: it adds ``2^(sink - top)`` to the divisor.
A step is four rows of a token; one row where rows are few, a quarter of its columns where fewest.
Up to eight pieces are summed column by column. More are laid out as tiles of eight pieces by
columns, so that a warp has two pieces of each: eight chains, which are joined in the end. Every
order of summation depends on the number of pieces alone.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.types import Array, Float, Int

__all__ = ["CHAINS", "combine"]

SHAPES = (  # rows of a multiprocessor at most, thread blocks of a row, rows of a step of each
    (2, 4, 1),
    (8, 1, 1),
    (2**31 - 1, 1, 4),
)
RESIDENT = 4
"""Thread blocks of a multiprocessor."""

FEW = (2, 4, 8)
"""Pieces in flight; up to the last of these, all pieces of a row are in flight at once."""

CHAINS = 8
"""More pieces than that are summed in interleaved chains. Loads reach over as many slots."""

IN_FLIGHT = {128: (4, 9, 17), 512: (2,)}
"""Pieces of every chain that are loaded at once, by the columns of a step."""

SEARCHED = 8
"""Pieces of every chain in a step of the search for their maximum, if they are more than that."""

TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((CHAINS, 128), (2, 128), (8,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
"""Eight pieces by a multiple of 128 columns: two pieces for a warp, 16 bytes for a load."""

OF_CHAIN = TILE.reduce(1)


@lib.lowered_once("heads", "multiprocessors", "early_launch", "interpret")
def combine(
    out: Float[Array, "rows rank"], lse: Float[Array, "rows"],
    part: Float[Array, "slots tiles 64 rank"], part_lse: Float[Array, "slots tiles 64"],
    merges: Int[Array, "list columns"], sinks: Float[Array, "at_least_heads"] | None = None, *,
    heads: int, multiprocessors: int, early_launch: bool, interpret: object = None,
) -> tuple[Float[Array, "rows rank"], Float[Array, "rows"]]:  # fmt: skip
    """``out`` and natural-log ``lse`` with the rows of split and of padding tokens filled in.

    Rows are ``token * heads + head``; all others are left alone. ``sinks`` are natural logits, as
    in ``merge.ref.apply_sinks``, of the rows that are filled in. ``early_launch`` starts the
    kernel while its predecessor runs; it waits for its end before it reads the parts. Slots are
    read, not used, up to ``CHAINS - 1`` behind the last piece.
    """
    rows, rank = out.shape
    wide, step = next(shape for most, *shape in SHAPES if rows <= most * multiprocessors)
    wide, step = math.gcd(wide, rank // 128), math.gcd(step, heads)
    units = rows // step * wide
    blocks = max(min(units, multiprocessors * RESIDENT), 1)
    columns = rank // wide
    kernel = lib.kernel(
        functools.partial(
            _body,
            heads=heads,
            blocks=blocks,
            columns=columns,
            step=step,
            early_launch=early_launch,
        ),
        out_type=(),
        scratch_types={
            "sums": plgpu.SMEM((CHAINS, columns), jnp.float32),
            "states": plgpu.SMEM((2, CHAINS), jnp.float32),  # maxima, weights
        },
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_dense_decode_combine",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            # All layouts are stated: inferring them would take ten times as long as the rest.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    of_heads = () if sinks is None else (sinks,)
    out, lse = lib.in_place(kernel, (part, part_lse, merges, *of_heads), (out, lse))
    return out, lse


def _body(
    part_g, part_lse_g, merges_g, *rest,
    heads, blocks, columns, step, early_launch, sums, states,
):  # fmt: skip
    *sinks_g, out_g, lse_g = rest
    block = lax.axis_index("block")
    wide = out_g.shape[1] // columns
    last = merges_g.shape[0] - 1
    units = lax.div(merges_g[0, 0] * (heads * wide), jnp.int32(step))

    def fields(unit):
        """What the list says of a unit's token; of its last token behind the end."""
        row = lax.div(unit, jnp.int32(wide)) * step
        i = jnp.minimum(lax.div(row, jnp.int32(heads)) + 1, last)
        return tuple(merges_g[i, f] for f in wp.MERGE_FIELDS)

    def merge(unit, base, n, query, token):
        head = lax.rem(lax.div(unit, jnp.int32(wide)) * step, jnp.int32(heads))
        quarter = lax.rem(unit, jnp.int32(wide))
        at = pl.ds(pl.multiple_of(quarter * columns, columns), columns)
        x = query * heads + head
        tile, row = lax.div(x, jnp.int32(64)), lax.rem(x, jnp.int32(64))
        _Unit(
            part=part_g, part_lse=part_lse_g, out=out_g, lse=lse_g, sums=sums, states=states,
            columns=columns, rows=step, at=at, writes_lse=lambda: quarter == 0,
            base=base, n=n, tile=tile, row=row, to=lambda r: token * heads + head + r,
            sinks=lambda r: [sink_g[head + r] * math.log2(math.e) for sink_g in sinks_g],
        ).run()  # fmt: skip

    first = fields(block)
    if early_launch:
        plgpu.griddepcontrol_wait()

    def turn(i, found):
        unit = block + i * blocks
        following = fields(unit + blocks)
        merge(unit, *found)
        return following

    lax.fori_loop(0, _steps(jnp.maximum(units - block, 0), blocks), turn, first)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """One step: the same columns of some rows of a token, one after the other in memory."""

    part: Any  # arrays in global memory
    part_lse: Any
    out: Any
    lse: Any
    sums: Any  # shared memory
    states: Any
    columns: int
    rows: int
    at: Any  # the columns
    writes_lse: Callable  # whether these columns are the first of the row
    base: Any  # slot of the first piece
    n: Any  # pieces
    tile: Any  # of the first row, in a slot
    row: Any
    to: Callable  # row of the result
    sinks: Callable  # base 2: none, or that of a row's head

    @property
    def layout(self):
        """Of a row's columns."""
        return plgpu.Layout.WG_STRIDED((self.columns,), vec_size=self.columns // 128)

    def run(self) -> None:
        @pl.when(self.n == 0)
        def _():
            for r in range(self.rows):
                self.store(self.empty(), jnp.float32(0.0), jnp.float32(-jnp.inf), [], r)

        for fewer, count in zip((0, *FEW), FEW, strict=False):

            @pl.when((self.n > fewer) & (self.n <= count))
            def _(count=count):
                together = min(max(16 // count, 1), self.rows)
                for r in range(0, self.rows, together):
                    self.few(count, range(r, r + together))

        @pl.when(self.n > FEW[-1])
        def _():
            pl.loop(0, self.rows)(self.many)

    def empty(self):
        return plgpu.layout_cast(jnp.zeros((self.columns,), jnp.float32), self.layout)

    def store(self, acc, weight, top, sinks, r) -> None:
        total = functools.reduce(lambda w, sink: w + jnp.exp2(sink - _finite(top)), sinks, weight)
        inverse = jnp.where(weight > 0.0, 1.0 / total, 0.0)
        to = self.to(r)
        self.out[to, self.at] = (acc * inverse).astype(self.out.dtype)
        lse = (top + jnp.log2(weight)) * math.log(2.0)

        @pl.when(self.writes_lse())
        def _():
            self.lse[to] = jnp.where(weight > 0.0, lse, -jnp.inf)

    def few(self, count, rows) -> None:
        """At most ``count`` pieces, column by column; all loads of all rows in flight."""
        slots = [self.base + jnp.minimum(p, self.n - 1) for p in range(count)]
        values = [
            [
                plgpu.load(self.part.at[s, self.tile, self.row + r, self.at], layout=self.layout)
                for s in slots
            ]
            for r in rows
        ]
        lses = [[self.part_lse[s, self.tile, self.row + r] for s in slots] for r in rows]
        sinks = [self.sinks(r) for r in rows]
        for r, loaded, found, more in zip(rows, values, lses, sinks, strict=True):
            found = [jnp.where(p < self.n, x, -jnp.inf) for p, x in enumerate(found)]
            top = functools.reduce(jnp.maximum, found)
            acc, weight = self.empty(), jnp.float32(0.0)
            for value, lse in zip(loaded, found, strict=True):
                w = jnp.exp2(lse - _finite(top))
                acc, weight = acc + value.astype(jnp.float32) * w, weight + w
            self.store(acc, weight, top, more, r)

    def many(self, r) -> None:
        """Eight chains of pieces: the maximum of each, its sum, and then all of them."""
        sinks = self.sinks(r)
        acc, weight, top = self.chains(r)
        plgpu.commit_smem()  # the row before was read
        self.sums[...], self.states[0], self.states[1] = acc, top, weight
        plgpu.commit_smem()
        tops = [self.states[0, c] for c in range(CHAINS)]
        top = functools.reduce(jnp.maximum, tops)
        acc, weight = self.empty(), jnp.float32(0.0)
        for c in range(CHAINS):
            w = jnp.exp2(tops[c] - _finite(top))
            acc = acc + plgpu.load(self.sums.at[c], layout=self.layout) * w
            weight = weight + self.states[1, c] * w
        self.store(acc, weight, top, sinks, r)

    def chains(self, r):
        """Sums, weights and maxima of the chains of a row."""
        count = _steps(self.n, CHAINS)
        in_flight = IN_FLIGHT[max(c for c in IN_FLIGHT if c <= self.columns)]
        size = min(SEARCHED, in_flight[-1])  # of a step, if they are more

        def piece(i):
            return pl.ds(self.base + jnp.minimum(i, count - 1) * CHAINS, CHAINS)

        def values(first, number):
            refs = [
                self.part.at[piece(first + i), self.tile, self.row + r, self.at]
                for i in range(number)
            ]
            return [plgpu.load(ref, layout=TILE, optimized=False) for ref in refs]

        def lses(first, number):
            index = plgpu.broadcasted_iota(jnp.int32, (CHAINS,), 0, layout=OF_CHAIN)
            refs = [
                self.part_lse.at[piece(first + i), self.tile, self.row + r] for i in range(number)
            ]
            found = [plgpu.load(ref, layout=OF_CHAIN, optimized=False) for ref in refs]
            return [
                jnp.where(index + (first + i) * CHAINS < self.n, x, -jnp.inf)
                for i, x in enumerate(found)
            ]

        def highest(i, top):
            return functools.reduce(jnp.maximum, lses(i * SEARCHED, SEARCHED), top)

        def start():
            zeros = plgpu.layout_cast(jnp.zeros((CHAINS,), jnp.float32), OF_CHAIN)
            tile = plgpu.layout_cast(jnp.zeros((CHAINS, self.columns), jnp.float32), TILE)
            return tile, zeros, zeros - jnp.inf

        def at_once(most):
            loaded, found = values(0, most), lses(0, most)
            acc, weight, top = start()
            top = functools.reduce(jnp.maximum, found, top)
            return *_add(acc, weight, top, found, loaded), top

        def in_steps():
            steps = _steps(count, size)
            acc, weight, top = start()
            top = lax.fori_loop(0, _steps(count, SEARCHED), highest, top)

            def some(i, state):
                return _add(*state, top, lses(i * size, size), values(i * size, size))

            return *lax.fori_loop(0, steps, some, (acc, weight)), top

        solve = in_steps
        for most in reversed(in_flight):
            solve = functools.partial(
                lax.cond, count <= most, functools.partial(at_once, most), solve
            )
        return solve()


def _finite(top):
    return jnp.where(top == -jnp.inf, 0.0, top)


def _add(acc, weight, top, found, loaded):
    """Pieces of every chain to its sum."""
    for lse, value in zip(found, loaded, strict=True):
        w = jnp.exp2(lse - _finite(top))
        wide_w = plgpu.layout_cast(lax.broadcast_in_dim(w, value.shape, (0,)), TILE)
        value = jnp.where(wide_w > 0.0, value.astype(jnp.float32), 0.0)
        acc, weight = acc + value * wide_w, weight + w
    return acc, weight


def _steps(n, size):
    return lax.div(n + (size - 1), jnp.int32(size))
