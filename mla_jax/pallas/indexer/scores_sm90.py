"""Index scores of e4m3 codes on Hopper, as integers of the same order: Pallas Mosaic GPU.

``score[i, s] = scale[s] * sum_h w[i, h] relu(q[i, h] . k[s])``; what comes out are ranks, as those
of ``kernels_triton``. Keys are the rows of a product and heads its columns, so a thread sums most
heads by itself. ``relu(x)`` is ``(x + |x|) / 2``: an addition runs at twice the rate of a maximum,
and the half is in the weights.

  gathered   a thread block has 256 keys and some queries. Four warpgroups hold 64 keys each in
             registers, queries stream through shared memory: a product reads only them there.
             Two queries are one product; a warpgroup sums while others multiply.
  paged      a warpgroup has a stream of pages of its own, 64 keys each, and one row's queries.

The bound of 256 keys and a query: 512 tensor-core cycles, and about 500 of instructions.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportReturnType=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_inline import arith, ir, nvvm
from mla_jax.types import cdiv

__all__ = ["DIM", "KEYS", "SIDE", "gathered_ranks", "paged_ranks"]

DIM = 128
"""Elements of a key: a row of shared memory."""

GROUPS, BLOCK = 4, 64
"""Warpgroups of a thread block, and keys of each: rows of one product."""

KEYS = GROUPS * BLOCK

SIDE = 32
"""Of a multiple of so many words is what goes with a query, 128 bytes as the copy engine wants."""

PAIRS, AHEAD = 8, 6
"""Pairs of queries in shared memory, and those loaded ahead: a warpgroup may lag by the rest."""

STREAMS = 6
"""Warpgroups of a thread block over pages: each hides what another one waits for."""

I32, F8 = jnp.int32, jnp.float8_e4m3fn
COLUMN = plgpu.Layout.WGMMA.reduce(0)
EIGHT = plgpu.Layout.WGMMA_8BIT
_TILES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
SHARED = plgpu.RefType(_TILES)
_PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)

SCALES = 2
"""Rows of a page, behind its keys, that hold their scales."""

_ROWS = (plgpu.TilingTransform((1, 128)), plgpu.SwizzleTransform(128))
"""The same bytes, for the copy engine to start at any row of global memory."""


@lib.lowered_once("columns", "queries")
def gathered_ranks(
    q: jax.Array, side: jax.Array, keys: jax.Array, scales: jax.Array, bounds: jax.Array,
    base: jax.Array, *, columns: int, queries: int,
) -> jax.Array:  # fmt: skip
    """Ranks ``[queries, columns]`` of keys from ``base`` on; what nobody sees is left as it was.

    ``q`` [queries, heads, DIM] and ``keys`` [keys, DIM] are codes, ``side`` [queries, words] words:
    halves of weights, then the key behind the last one. ``bounds`` [groups, 2] are the first key
    and the one behind the last of each ``queries`` queries. ``base`` and the number of keys are
    multiples of 8.
    """
    count, heads, _ = q.shape
    words = side.shape[1]
    body = functools.partial(_gathered, columns=columns, queries=queries, heads=heads)
    kernel = lib.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, columns), I32),
        scratch_types={
            "q": lib.swizzled((PAIRS, 2 * heads, DIM), F8),
            "side": plgpu.SMEM((PAIRS, 2, words), I32),
            "k": lib.swizzled((KEYS, DIM), F8),
            "s": plgpu.SMEM((KEYS,), jnp.float32),
            "k_full": lib.barrier(2),
            "full": lib.barrier(2, PAIRS),
            "free": lib.barrier(GROUPS, PAIRS),
        },
        grid=(cdiv(count, queries) * cdiv(columns, KEYS),),
        grid_names=("item",),
        num_threads=GROUPS,
        thread_name="wg",
        kernel_name="mla_index_ranks",
        compiler_params=_PARAMS,
    )
    return kernel(q.reshape(count * heads, DIM), side, keys, scales, bounds, base.reshape(1))


def _gathered(
    q_g, side_g, k_g, s_g, bounds_g, base_g, ranks_g, *, columns, queries, heads, **refs
) -> None:
    """One thread block: its keys, and its queries two by two."""
    wg, item = lax.axis_index("wg"), lax.axis_index("item")
    tiles = cdiv(columns, KEYS)
    group, tile = lax.div(item, tiles), lax.rem(item, tiles)
    first, column = group * queries, tile * KEYS
    key = pl.multiple_of(base_g[0] + column, 8)
    n = jnp.minimum(queries, side_g.shape[0] - first)
    pairs = cdiv_(n, 2)
    seen = (key < bounds_g[group, 1]) & (key + KEYS > bounds_g[group, 0])
    full, free = refs["full"], refs["free"]

    def load(p):
        """Pair ``p`` into its slot, once that is free; zeros stand behind the last query."""
        slot = lax.rem(jnp.asarray(p, I32), PAIRS)
        if not isinstance(p, int):
            pl.when(p >= PAIRS)(lambda: plgpu.barrier_wait(free.at[slot]))
        start = pl.multiple_of((first + 2 * p) * heads, 8)
        sources = q_g.at[pl.ds(start, 2 * heads)], side_g.at[pl.ds(first + 2 * p, 2)]
        for src, name in zip(sources, ("q", "side"), strict=True):
            plgpu.copy_gmem_to_smem(src, refs[name].at[slot], full.at[slot])

    @pl.when(seen)
    def _():
        @pl.when(wg == 0)
        def _():
            for src, name in ((k_g, "k"), (s_g, "s")):
                plgpu.copy_gmem_to_smem(src.at[pl.ds(key, KEYS)], refs[name], refs["k_full"])
            for p in range(AHEAD):
                pl.when(p < pairs)(lambda p=p: load(p))

        plgpu.barrier_wait(refs["k_full"])
        k = plgpu.load(refs["k"].at[pl.ds(wg * BLOCK, BLOCK)], layout=EIGHT)
        scale = _scale(refs["s"], wg * BLOCK)
        facts = {"column": column + wg * BLOCK, "columns": columns}

        @pl.loop(0, pairs)
        def _(p):
            pl.when((wg == 0) & (p + AHEAD < pairs))(lambda: load(p + AHEAD))
            slot = lax.rem(p, PAIRS)
            plgpu.barrier_wait(full.at[slot])
            both = lib.landed(_multiply(k, refs["q"].at[slot]), 0)
            for i in range(2):
                x = both[:, i * heads : (i + 1) * heads]
                w = plgpu.load(refs["side"].at[slot, i, pl.ds(0, heads)], layout=COLUMN)
                last = refs["side"][slot, i, heads]
                if i == 1:
                    plgpu.barrier_arrive(free.at[slot])
                mine = 2 * p + i
                limit = jnp.where(mine < n, jnp.minimum(last - base_g[0], columns), 0)
                _store(x, w, scale, ranks_g, first + mine, limit, **facts)


def cdiv_(a, b: int):
    """``cdiv`` of a number that is not known while tracing, and not negative."""
    return lax.div(a + (b - 1), b)


@lib.lowered_once("columns", "span")
def paged_ranks(
    q: jax.Array, side: jax.Array, pages: jax.Array, table: jax.Array, longest: jax.Array,
    layer: jax.Array, base: jax.Array, *, columns: int, span: int,
) -> jax.Array:  # fmt: skip
    """Ranks ``[rows * queries, columns]`` of positions from ``base`` on, keys in pages.

    ``q`` [rows, queries, heads, DIM], ``side`` as above, ``pages`` [layers, pages, bytes]
    ``index_key`` records in pages of BLOCK, ``longest`` [rows] positions of a row. A warpgroup has
    ``span`` pages.
    """
    rows, queries, heads, _ = q.shape
    layers, count, size = pages.shape
    assert size == BLOCK * (DIM + 4)
    slots = 4 if queries < 3 else 3  # pages of a warpgroup in shared memory
    shape = STREAMS, slots, BLOCK, DIM
    body = functools.partial(_paged, columns=columns, span=span)
    kernel = lib.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows * queries, columns), I32),
        scratch_types={
            "q": lib.swizzled((queries, heads, DIM), F8),
            "side": plgpu.SMEM((queries, side.shape[1]), I32),
            "k": plgpu.RefUnion(
                lib.swizzled(shape, F8), plgpu.SMEM(shape, jnp.uint8, transforms=_ROWS)
            ),
            "s": plgpu.SMEM((STREAMS, slots, SCALES, DIM), jnp.uint8),
            "q_full": lib.barrier(2 * queries),
            "full": lib.barrier(2, STREAMS * slots),
            "free": lib.barrier(1, STREAMS * slots),
        },
        grid=(rows * cdiv(columns, STREAMS * BLOCK * span),),
        grid_names=("item",),
        num_threads=STREAMS,
        thread_name="wg",
        kernel_name="mla_index_ranks_paged",
        compiler_params=_PARAMS,
    )
    flat = pages.reshape(layers * count, BLOCK + SCALES, DIM)
    first = jnp.clip(layer, 0, layers - 1) * count
    facts = jnp.stack([base, first, jnp.asarray(count, I32)]).astype(I32)
    return kernel(q, side, flat, table, longest, facts)


def _paged(
    q_g, side_g, pages_g, table_g, longest_g, facts_g, ranks_g, *, columns, span, **refs
) -> None:
    """One thread block: a row's queries, and a stream of its pages for each warpgroup."""
    wg, item = lax.axis_index("wg"), lax.axis_index("item")
    queries, (_, slots, *_) = refs["q"].shape[0], refs["s"].shape
    spans = cdiv(columns, STREAMS * BLOCK * span)
    row, part = lax.div(item, spans), lax.rem(item, spans)
    base, offset, count = facts_g[0], facts_g[1], facts_g[2]
    column = part * (STREAMS * BLOCK * span)
    # Positions of the thread block.
    seen = jnp.minimum(jnp.minimum(longest_g[row] - base, columns) - column, STREAMS * BLOCK * span)
    codes, copied = refs["k"]
    full, free = (lambda s, x=refs[name]: x.at[wg * slots + s] for name in ("full", "free"))

    def place(i):
        """Where page ``i`` of this stream lies, or -1."""
        at = lax.div(base + column, BLOCK) + i * STREAMS + wg
        found = table_g[row, jnp.minimum(at, table_g.shape[1] - 1)]
        return jnp.where((found >= 0) & (found < count), found + offset, -1)

    def load(i, where):
        slot, source = lax.rem(jnp.asarray(i, I32), slots), pages_g.at[jnp.maximum(where, 0)]
        if not isinstance(i, int):  # all warps of this group have read what was there
            pl.when(i >= slots)(lambda: plgpu.barrier_wait(free(slot)))
        pieces = (pl.ds(0, BLOCK), copied), (pl.ds(BLOCK, SCALES), refs["s"])
        for rows, to in pieces:
            plgpu.copy_gmem_to_smem(source.at[rows], to.at[wg, slot], full(slot))

    def step(i, carry):
        here, ahead = carry  # of pages i and i + slots - 1
        slot = lax.rem(i, slots)
        pl.when(i + slots - 1 < n)(lambda: load(i + slots - 1, ahead))
        after = place(jnp.minimum(i + 1, n - 1)), place(jnp.minimum(i + slots, n - 1))
        plgpu.barrier_wait(full(slot))
        scale = jnp.where(here >= 0, _scale(refs["s"].at[wg, slot], 0), MISSING)
        at = column + (i * STREAMS + wg) * BLOCK

        @pl.loop(0, queries)
        def _(j):
            x = lib.landed(_multiply(codes.at[wg, slot], refs["q"].at[j], SHARED), 0)
            pl.when(j == queries - 1)(lambda: plgpu.barrier_arrive(free(slot)))
            heads = x.shape[1]
            w = plgpu.load(refs["side"].at[j, pl.ds(0, heads)], layout=COLUMN)
            limit = jnp.minimum(refs["side"][j, heads] - base, columns)
            _store(x, w, scale, ranks_g, row * queries + j, limit, column=at, columns=columns)

        return after

    n = cdiv_(jnp.maximum(cdiv_(jnp.maximum(seen, 0), BLOCK) - wg, 0), STREAMS)

    @pl.when(seen > 0)
    def _():
        @pl.when(wg == 0)
        def _():
            for j in range(queries):
                for src, name in ((q_g.at[row, j], "q"), (side_g.at[row * queries + j], "side")):
                    plgpu.copy_gmem_to_smem(src, refs[name].at[j], refs["q_full"])

        for i in range(slots - 1):
            pl.when(i < n)(lambda i=i: load(i, place(jnp.int32(i))))
        plgpu.barrier_wait(refs["q_full"])
        first = place(jnp.int32(0)), place(jnp.clip(n - 1, 0, slots - 1))
        lax.fori_loop(0, n, step, first)


def _multiply(k, q, kind=EIGHT) -> jax.Array:
    """``k q^T`` [64, columns] in flight. ``kind``: keys in registers, or ``SHARED``."""
    columns = q.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(kind, SHARED),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, columns), jnp.float32, layout=lib.WGMMA),
    )
    def issue(_, k, q):
        return _group(k, q, columns)

    return issue(k, q)


def _group(k, q, heads: int):
    transposed = mgpu.utils.memref_transpose(q, (1, 0, 3, 2))
    acc = mgpu.wgmma(mgpu.WGMMAAccumulator.zero(BLOCK, heads), k, transposed)
    nvvm.wgmma_commit_group_sync_aligned()
    return acc.value


_LANE = """
    mov.u32 lane, %tid.x;
    bfe.u32 row, lane, 5, 2;
    bfe.u32 key, lane, 2, 3;
    mad.lo.u32 row, row, 16, key;
    bfi.b32 row, lane, row, 3, 1;
"""
"""Of a product's rows a thread sums up ``row``: one of the two that its quad of lanes has."""


def _scale(scales, first):
    """The scale of a thread's key: a number that differs from thread to thread."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR), return_type=inline.NUMBER)
    def read(_, scales, first):
        code = f"""{{
            .reg .u32 lane, row, key;
            .reg .u64 at;
            {_LANE}
            add.u32 row, row, $2;
            mul.wide.u32 at, row, 4;
            add.u64 at, at, $1;
            ld.shared.b32 $0, [at];
            }}"""
        operands = [mgpu.utils.memref_ptr(scales), first.registers.item()]
        return inline.number(inline.asm(code, operands, "=r,l,r,~{memory}", result="i32"))

    return read(scales, jnp.asarray(first, I32))


MISSING = -(1 << 23)
"""Bits of the scale of a page that is not there, minus infinity: its scores are 0."""


def _store(x, w, scale, ranks, query, limit, *, column, columns: int) -> None:
    """Sum up ``x`` [64, heads], and store ranks at columns from ``column`` on below ``limit``."""

    @plgpu.inline_mgpu(
        arg_types=(lib.WGMMA, COLUMN, inline.SCALAR, plgpu.RefType(), *(inline.SCALAR,) * 3)
    )
    def store(_, x, w, scale, ranks, query, limit, column):

        f32 = ir.F32Type.get()
        words = [v for r in x.registers.flat for v in inline.words(r)]
        weights = [v for r in w.registers.flat for v in inline.words(r)]
        assert len(words) == 2 * len(weights), "of every eight columns: two, in two rows"
        first = 5
        lines = []
        for n in range(len(words)):
            tile, row, c = n // 4, n // 2 % 2, n % 2
            lines.append(f"abs.f32 y, ${first + n};")
            lines.append(f"add.f32 y, y, ${first + n};")
            weight = first + len(words) + 2 * tile + c
            sum_ = f"s{2 * row + c}"
            lines.append(
                f"mul.f32 {sum_}, y, ${weight};" if tile == 0
                else f"fma.rn.f32 {sum_}, y, ${weight}, {sum_};"
            )  # fmt: skip
        code = f"""{{
            .reg .pred p, odd;
            .reg .u32 lane, row, key, t, u;
            .reg .u64 at;
            .reg .f32 y, s<4>;
            {_LANE}
            {" ".join(lines)}
            add.f32 s0, s0, s1;
            add.f32 s2, s2, s3;
            and.b32 t, lane, 1;
            setp.eq.u32 odd, t, 1;
            selp.f32 s1, s2, s0, odd;
            selp.f32 s3, s0, s2, odd;
            mov.b32 t, s3;
            shfl.sync.bfly.b32 t, t, 1, 31, 0xffffffff;
            mov.b32 y, t;
            add.f32 s1, s1, y;
            mov.b32 t, s1;
            shfl.sync.bfly.b32 t, t, 2, 31, 0xffffffff;
            mov.b32 y, t;
            add.f32 s1, s1, y;
            mov.b32 y, $1;
            mul.f32 s1, s1, y;
            add.f32 s1, s1, 0f00000000;
            mov.b32 t, s1;
            shr.s32 u, t, 31;
            and.b32 u, u, 0x7fffffff;
            xor.b32 t, t, u;
            setp.nan.f32 p, s1, s1;
            selp.b32 t, 0x80000001, t, p;
            setp.eq.u32 p, $1, {MISSING};
            selp.b32 t, 0, t, p;
            add.u32 row, row, $4;
            and.b32 u, lane, 2;
            setp.eq.u32 p, u, 0;
            setp.lt.and.s32 p, row, $3, p;
            mul.wide.s32 at, $2, {4 * columns};
            mad.wide.s32 at, row, 4, at;
            add.u64 at, at, $0;
            @p st.global.b32 [at], t;
            }}"""
        scalars = [a.registers.item() for a in (scale, query, limit, column)]
        floats = [arith.bitcast(f32, v) for v in (*words, *weights)]
        operands = [mgpu.utils.memref_ptr(ranks), *scalars, *floats]
        inline.asm(code, operands, "l,r,r,r,r," + ",".join("f" * len(floats)) + ",~{memory}")

    store(x, w, scale, ranks, query, limit, column)
