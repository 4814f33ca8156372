"""Index scores on Hopper, as integers of the same order: Pallas Mosaic GPU.

``score[i, s] = scale[s] * sum_h w[i, h] relu(q[i, h] . k[s])``; what comes out are ranks, as those
of ``kernels_triton``. Keys are the rows of a product and heads its columns, so a thread sums most
heads by itself. Of codes ``relu(x)`` is ``(x + |x|) / 2`` or, in half of the sums, a comparison and
what is positive: both run at a higher rate than a maximum. The half is in the weights.

Here are the sums, and the kernel over gathered codes: a thread block goes through tiles of 256
keys, and through some queries for each. Four warpgroups hold 64 keys each in registers, a warp of a
fifth one loads queries into shared memory: a product reads only them there. Two queries are one
product; a warpgroup sums while others multiply. The bound of 256 keys and a query: 512 tensor-core
cycles. It takes 790 with its sums, for both use the register file. The kernel over pages is in
``paged_sm90``.

Each multiprocessor has one thread block, and each of these has the same number of pairs of a tile
and two queries: two parts of all of them, tile by tile, one as far from the beginning as the other
one from the end. So it does not matter that the first keys are seen by more queries.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_inline import arith, ir, nvvm
from mla_jax.types import cdiv

__all__ = [
    "BLOCK", "DIM", "F8", "I32", "KEYS", "MISSING", "PARAMS", "SIDE", "cdiv_", "gathered_ranks",
    "lane_numbers", "multiply", "scale_of", "shared_as", "store_ranks", "stretch_of",
]  # fmt: skip

DIM = 128
"""Elements of a key: a row of shared memory."""

GROUPS, BLOCK = 4, 64
"""Warpgroups of a thread block, and keys of each: rows of one product."""

KEYS = GROUPS * BLOCK

SIDE = 32
"""Of a multiple of so many words is what goes with a query, 128 bytes as the copy engine wants."""

PAIRS = 8
"""Pairs of queries in shared memory."""

REGISTERS = 32, 112
"""Of a thread that loads, and of one that multiplies."""

TOGETHER = 64
"""Queries whose bounds are one: keys that none of them sees are skipped."""

NEAR = 256
"""Pairs of queries: where in them a thread block begins, others begin too."""

I32, F8 = jnp.int32, jnp.float8_e4m3fn
COLUMN = plgpu.Layout.WGMMA.reduce(0)
EIGHT = plgpu.Layout.WGMMA_8BIT
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


@lib.lowered_once("rows", "columns", "workers")
def gathered_ranks(
    q: jax.Array, side: jax.Array, keys: jax.Array, scales: jax.Array, low: jax.Array,
    high: jax.Array, base: jax.Array | None, first: jax.Array | None,
    *, rows: int, columns: int, workers: int,
) -> jax.Array:  # fmt: skip
    """Ranks ``[rows, columns]`` of keys from ``base`` (or 0) on; what nobody sees stays as it was.

    ``q`` [all queries, heads, DIM] and ``keys`` [keys, DIM] are codes; ranks are of the ``rows``
    queries from ``first`` (or 0) on, a multiple of ``rows``. ``side`` [all queries, words] are
    words: halves of weights, then the key behind the last one. ``low`` and ``high`` [groups] are
    the first key and the one behind the last of each ``TOGETHER`` queries, those of each ``rows``
    queries apart. ``base`` and the number of keys are multiples of 8. ``workers``: thread blocks.
    """
    heads, words, groups = q.shape[1], side.shape[1], cdiv(rows, TOGETHER)
    whole = base is None and first is None
    pairs, tiles = cdiv(rows, 2), cdiv(columns, KEYS)
    workers = min(workers, cdiv(pairs * tiles, 2))
    work = _Work(pairs=pairs, tiles=tiles, workers=workers)
    body = functools.partial(_gathered, columns=columns, heads=heads, work=work, whole=whole)
    kernel = lib.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), I32),
        scratch_types={
            "q": lib.swizzled((PAIRS, 2 * heads, DIM), F8),
            "side": plgpu.SMEM((PAIRS, 2, words), I32),
            "k": lib.swizzled((KEYS, DIM), F8),
            "s": plgpu.SMEM((KEYS,), jnp.float32),
            "k_full": lib.barrier(2),
            "k_free": lib.barrier(GROUPS),
            "full": lib.barrier(3, PAIRS),
            "free": lib.barrier(GROUPS, PAIRS),
        },
        grid=(workers,),
        grid_names=("worker",),
        num_threads=GROUPS + 1,
        thread_name="wg",
        kernel_name="mla_index_ranks",
        compiler_params=PARAMS,
    )
    numbers = low  # is not read
    if not whole:
        base, first = (jnp.int32(0) if x is None else x for x in (base, first))
        numbers = jnp.stack([base, first, lax.div(first, jnp.int32(rows)) * groups])
    return kernel(q, side, keys, scales, low, high, numbers)


def _gathered(
    q_g, side_g, k_g, s_g, low_g, high_g, numbers_g, ranks_g,
    *, columns, heads, work, whole, **refs,
) -> None:  # fmt: skip
    """One thread block: its tiles of keys, and its queries two by two."""
    # The last one: groups of earlier calls.
    base, row, earlier = (jnp.int32(0) if whole else numbers_g[i] for i in range(3))
    facts = {"refs": refs, "work": work, "low": low_g, "high": high_g}
    facts |= {"earlier": earlier, "base": base}
    sources = {"keys": (k_g, s_g), "q": q_g, "side": side_g}
    lib.multipliers_and_loader(
        GROUPS,
        registers=REGISTERS,
        multiplier=lambda wg: _Multiplier(**facts, columns=columns, ranks=ranks_g, wg=wg),
        loader=lambda: _Loader(**facts, **sources, first=row, heads=heads),
        simulate=False,
    )


def stretch_of(i, worker, workers: int, work: int):
    """Where the ``i``th of a worker's four stretches of all the ``work`` begins and ends.

    The first two are a part of it, the last two another part: from a multiple of ``NEAR`` on to the
    end, then what is before. So all workers go through about the same queries at a time, and most
    of these are read from the L2 cache.
    """
    place = jnp.where(i < 2, worker, 2 * workers - 1 - worker)
    start, end = (lax.div((place + x) * work, 2 * workers) for x in (0, 1))
    middle = jnp.minimum(NEAR * cdiv_(start, NEAR), end)
    rest = (i & 1) == 1
    return jnp.where(rest, start, middle), jnp.where(rest, middle, end)


class _Work(NamedTuple):
    """All thread blocks together have every pair of queries with every tile of keys."""

    pairs: int
    tiles: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class _Role:
    """What both roles of a thread block over gathered keys know."""

    refs: dict[str, Any]
    work: _Work
    low: Any  # keys that a group of queries sees
    high: Any
    earlier: Any  # groups
    base: Any  # the first key

    def walk(self, begin: Callable[..., Any], each: Callable[..., None]) -> None:
        """``begin(t, tile)`` of each tile, the ``t``th one of the thread block; and what that gives
        as the last argument of ``each(n, pair, tile, given)`` of its pairs, the ``n``th one."""
        worker, (pairs, tiles, workers) = lax.axis_index("worker"), self.work

        def stretch(i, done):
            start, end = stretch_of(i, worker, workers, pairs * tiles)

            def one(tile, done):
                t, n = done
                given = begin(t, tile)
                a = jnp.maximum(start - tile * pairs, 0)
                b = jnp.minimum(end - tile * pairs, pairs)
                return t + 1, self._seen(n, a, b, tile, lambda n, p: each(n, p, tile, given))

            behind = jnp.where(start < end, lax.div(end - 1, pairs) + 1, 0)
            return lax.fori_loop(lax.div(start, pairs), behind, one, done)

        lax.fori_loop(0, 4, stretch, (jnp.int32(0), jnp.int32(0)))

    def _seen(self, n, a, b, tile, each: Callable[[Any, Any], None]) -> Any:
        """``each(n, pair)`` of pairs ``a`` to ``b`` whose group sees the tile; the next ``n``."""
        size, key = TOGETHER // 2, self.key(tile)
        groups = cdiv_(b, size)

        def bounds(group):
            at = self.earlier + jnp.minimum(group, groups - 1)
            return self.low[at], self.high[at]

        def group(g, carry):
            n, low, high = carry
            ahead = bounds(g + 1)
            first = jnp.maximum(a, g * size)
            seen = (key < high) & (key + KEYS > low)
            count = jnp.where(seen, jnp.minimum(b, (g + 1) * size) - first, 0)
            pl.loop(0, count)(lambda i: each(n + i, first + i))
            return n + count, *ahead

        begin = lax.div(a, size)
        return lax.fori_loop(begin, groups, group, (n, *bounds(begin)))[0]

    def key(self, tile):
        """The first one of a tile."""
        return 8 * (lax.div(self.base, 8) + tile * (KEYS // 8))  # seen to be a multiple of 8


@dataclass(frozen=True, kw_only=True)
class _Loader(_Role):
    """One warp: loads keys, then pair after pair."""

    keys: Any  # and their scales
    q: Any
    side: Any
    first: Any  # query
    heads: int

    def run(self) -> None:
        self.walk(self._begin, self._load)

    def _begin(self, t, tile) -> None:
        pl.when(t > 0)(lambda: plgpu.barrier_wait(self.refs["k_free"]))
        for src, name in zip(self.keys, ("k", "s"), strict=True):
            part = src.at[pl.ds(self.key(tile), KEYS)]
            plgpu.copy_gmem_to_smem(part, self.refs[name], self.refs["k_full"])

    def _load(self, n, pair, *_) -> None:
        """A pair into its slot, once that is free; zeros stand behind the last query."""
        slot, query = lax.rem(n, PAIRS), self.first + 2 * pair
        free, full = (self.refs[name].at[slot] for name in ("free", "full"))
        pl.when(n >= PAIRS)(lambda: plgpu.barrier_wait(free))
        for i in range(2):
            to = self.refs["q"].at[slot, pl.ds(i * self.heads, self.heads)]
            plgpu.copy_gmem_to_smem(self.q.at[query + i], to, full)
        plgpu.copy_gmem_to_smem(self.side.at[pl.ds(query, 2)], self.refs["side"].at[slot], full)


@dataclass(frozen=True, kw_only=True)
class _Multiplier(_Role):
    """A warpgroup: the ranks of its keys for each pair."""

    ranks: Any
    columns: int
    wg: Any

    def run(self) -> None:
        self.walk(self._begin, self._multiply)

    def _begin(self, *_) -> tuple[Any, ...]:
        """The warpgroup's keys and a thread's scale, in registers."""
        refs, mine = self.refs, self.wg * BLOCK
        plgpu.barrier_wait(refs["k_full"])
        k = plgpu.load(refs["k"].at[pl.ds(mine, BLOCK)], layout=EIGHT)
        lanes = lane_numbers()
        scale = scale_of(refs["s"], mine + lanes[1])
        plgpu.barrier_arrive(refs["k_free"])
        return k, lanes, scale

    def _multiply(self, n, pair, tile, given) -> None:
        k, lanes, scale = given
        slot, column = lax.rem(n, PAIRS), tile * KEYS + self.wg * BLOCK
        facts = {"lanes": lanes, "column": column, "columns": self.columns, "base": self.base}
        side = self.refs["side"].at[slot]
        plgpu.barrier_wait(self.refs["full"].at[slot])
        both = lib.landed(multiply(k, self.refs["q"].at[slot], EIGHT, shared_as(F8)), 0)
        store_ranks(both, side, scale, self.ranks, 2 * pair, self.columns - column, **facts)
        plgpu.barrier_arrive(self.refs["free"].at[slot])


def shared_as(dtype: DTypeLike) -> plgpu.RefType:
    """The type of a part of ``lib.swizzled`` in instructions."""
    return plgpu.RefType(lib.swizzled((), dtype).transforms)


def cdiv_(a, b: int):
    """``cdiv`` of a number that is not known while tracing, and not negative."""
    return lax.div(a + (b - 1), b)


def multiply(k, q, *kinds) -> jax.Array:
    """``k q^T`` [64, columns] in flight. ``kinds``: where each is, keys in registers or not."""
    columns = q.shape[0]

    @plgpu.inline_mgpu(
        arg_types=kinds,
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
    bfe.u32 t, lane, 2, 3;
    mad.lo.u32 row, row, 16, t;
    bfi.b32 row, lane, row, 3, 1;
"""
"""Of a product's rows a thread sums up ``row``: one of the two that its quad of lanes has."""


def lane_numbers():
    """Numbers that differ from thread to thread: its lane of a quad, and its key of a product."""

    @plgpu.inline_mgpu(arg_types=(), return_type=(inline.NUMBER,) * 2)
    def read(_):
        code = f"""{{
            .reg .u32 lane, row, t;
            {_LANE}
            and.b32 $0, lane, 3;
            mov.u32 $1, row;
            }}"""
        found = inline.asm(code, [], "=r,=r", result="struct<(i32, i32)>")
        return tuple(inline.number(x) for x in inline.unpacked(found, 2))

    return read()


def scale_of(scales, key, *, half: bool = False):
    """The scale of a thread's key, or its half."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), inline.SCALAR), return_type=inline.NUMBER)
    def read(_, scales, key):
        code = f"""{{
            .reg .u64 at;
            .reg .f32 y;
            mul.wide.u32 at, $2, 4;
            add.u64 at, at, $1;
            ld.shared.f32 y, [at];
            {"mul.f32 y, y, 0f3F000000;" if half else ""}
            mov.b32 $0, y;
            }}"""
        operands = [mgpu.utils.memref_ptr(scales), key.registers.item()]
        return inline.number(inline.asm(code, operands, "=r,l,r,~{memory}", result="i32"))

    return read(scales, key)


MISSING = -(1 << 23)
"""Bits of the scale of a page that is not there, minus infinity: its scores are 0."""

_PAIR = """
    selp.f32 y, s0, s1, odd;
    selp.f32 s0, s1, s0, odd;
    selp.f32 z, s2, s3, odd;
    selp.f32 s2, s3, s2, odd;
    shfl.sync.bfly.b32 y, y, 1, 31, 0xffffffff;
    shfl.sync.bfly.b32 z, z, 1, 31, 0xffffffff;
    add.f32 s0, s0, y;
    add.f32 s2, s2, z;
    selp.f32 y, s0, s2, other;
    selp.f32 s0, s2, s0, other;
    shfl.sync.bfly.b32 y, y, 2, 31, 0xffffffff;
    add.f32 s0, s0, y;
"""
"""Of a quad's sums of two rows (``s0``, ``s1``) of one query and of another one: one a lane."""

_SINGLE = """
    selp.f32 y, s0, s1, odd;
    selp.f32 s0, s1, s0, odd;
    shfl.sync.bfly.b32 y, y, 1, 31, 0xffffffff;
    add.f32 s0, s0, y;
    shfl.sync.bfly.b32 y, s0, 2, 31, 0xffffffff;
    add.f32 s0, s0, y;
"""
"""The same of one query: two lanes have the same sum."""


def _sums(
    count: int, heads: int, words: int, first: int, some: int, *, codes: bool, space: str
) -> str:
    """``s[2 i + row]``: a thread's part of query ``i``'s sums, of operands from ``$first`` on.

    ``part`` is where the thread's weights begin, ``words`` those of a query; of ``some`` tiles of
    eight heads they lie side by side, in the state space ``space``. Of ``codes`` the sums are twice
    as large: one row adds what is positive, twice, the other one ``x + |x|``. Comparisons and
    additions have units of their own, so half of each is faster than either. Weights are finite.
    """
    lines, tiles = [], heads // 8
    for i in range(count):
        sums = [[f"s{2 * i + row}", f"r{row}"] for row in range(2)]
        for tile in range(tiles):
            if tile % some == 0:
                names = ", ".join(f"w{n}" for n in range(2 * some))
                at = 4 * (i * words + 8 * tile)
                lines.append(f"ld.{space}.v{2 * some}.f32 {{{names}}}, [part+{at}];")
            xs = [f"${first + 4 * (i * tiles + tile) + n}" for n in range(4)]
            for n, x in enumerate(xs):
                if not codes:
                    lines.append(f"max.NaN.f32 y{n}, {x}, 0f00000000;")
                elif n < 2:
                    lines.append(f"setp.gtu.f32 k{n}, {x}, 0f00000000;")  # of NaN too
                else:
                    lines.append(f"abs.f32 y{n}, {x}; add.f32 y{n}, y{n}, {x};")
            for n, x in enumerate(xs):
                to, weight = sums[n // 2][n % 2], f"w{2 * (tile % some) + n % 2}"
                only, y = (f"@k{n}", x) if codes and n < 2 else ("", f"y{n}")
                if tile:
                    lines.append(f"{only} fma.rn.f32 {to}, {y}, {weight}, {to};")
                else:
                    lines.append(f"mov.f32 {to}, 0f00000000; {only} mul.f32 {to}, {y}, {weight};")
        lines += [f"add.f32 {a}, {a}, {b};" for a, b in sums]
        lines += [f"add.f32 {a}, {a}, {a};" for a, _ in sums[:codes]]
    return " ".join(lines)


def store_ranks(
    x, side, scale, ranks, query, limit,
    *, lanes, column, base, columns: int, codes: bool = True, keep: bool = False,
) -> None:  # fmt: skip
    """Sum up ``x`` [64, heads], and store ranks of keys whose row of it is below ``limit``.

    ``x`` may be of two queries side by side: ``side`` are words of each, halves of weights, then
    the key behind the last one; column 0 is key ``base``. Of one query ``side`` are its weights,
    in order, and its page may be missing. Products of ``codes`` are finite. ``keep``: the L2 cache
    shall keep the ranks until they are read.
    """
    kinds = lib.WGMMA, plgpu.RefType(), plgpu.RefType(), *(inline.SCALAR,) * 7

    @plgpu.inline_mgpu(arg_types=kinds)
    def store(_, x, side, ranks, *numbers):
        f32 = ir.F32Type.get()
        values = [v for r in x.registers.flat for v in inline.words(r)]
        count, words = ir.MemRefType(side.type).shape
        heads = 2 * len(values) // count
        some = 2 if count == 2 and heads > 8 else 1
        space = "shared" if mgpu.utils.is_smem_ref(side) else "global.nc"
        code = f"""{{
            .reg .pred p, odd, other;
            .reg .u32 t, u, last;
            .reg .u64 at, part;
            .reg .f32 y, z, y<4>, s<4>, r<2>, w<4>;
            .reg .pred k<2>;
            mad.wide.u32 part, $2, {8 * some}, $1;
            {_sums(count, heads, words, 9, some, codes=codes, space=space)}
            and.b32 t, $2, 1;
            setp.ne.u32 odd, t, 0;
            setp.ge.u32 other, $2, 2;
            {_PAIR if count == 2 else _SINGLE}
            mov.b32 y, $4;
            fma.rn.f32 s0, s0, y, 0f00000000;
            mov.b32 t, s0;
            shr.s32 u, t, 31;
            and.b32 u, u, 0x7fffffff;
            xor.b32 t, t, u;
            setp.nan.f32 p, s0, s0;
            selp.b32 t, 0x80000001, t, p;
            {_OF_TWO.format(words=4 * words, heads=4 * heads) if count == 2 else _OF_ONE}
            mul.wide.u32 at, u, {4 * columns};
            add.u64 at, at, $0;
            add.u32 u, $3, $7;
            mad.wide.u32 at, u, 4, at;
            {_KEPT if keep else "@p st.global.b32 [at], t;"}
            }}"""
        scalars = [a.registers.item() for a in numbers]
        pointers = [mgpu.utils.memref_ptr(r) for r in (ranks, side)]
        floats = [arith.bitcast(f32, v) for v in values]
        kinds = ",".join("ll" + "r" * len(scalars) + "f" * len(floats))
        inline.asm(code, [*pointers, *scalars, *floats], kinds + ",~{memory}")

    store(x, side, ranks, *lanes, scale, query, limit, column, base)


_KEPT = """
    createpolicy.fractional.L2::evict_last.b64 part, 1.0;
    @p st.global.L2::cache_hint.b32 [at], t, part;
"""

_OF_TWO = """
    shr.u32 u, $2, 1;
    mad.wide.u32 part, u, {words}, $1;
    ld.shared.b32 last, [part+{heads}];
    sub.u32 last, last, $8;
    sub.u32 last, last, $7;
    setp.lt.s32 p, $3, last;
    setp.lt.and.s32 p, $3, $6, p;
    add.u32 u, u, $5;
"""
"""``u``: the query of a thread, one of two; ``p``: whether it sees the thread's key."""

_OF_ONE = f"""
    setp.eq.u32 p, $4, {MISSING};
    selp.b32 t, 0, t, p;
    setp.lt.s32 p, $3, $6;
    not.pred other, other;
    and.pred p, p, other;
    mov.u32 u, $5;
"""
"""The same of one query, and its rank if the page is missing; one of two lanes stores it."""
