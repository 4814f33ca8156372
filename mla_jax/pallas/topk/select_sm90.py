"""The best ``k`` of each row of ranks on Hopper, each rank read once: Pallas Mosaic GPU.

A cluster of thread blocks has a row, a thread has ``each`` of its ranks in registers. The rank of
the last one kept is found from its top bits on: 11, 11 and 10 of them. Those that agree with what
is known so far are counted in a table of their next bits in shared memory; blocks send each other
the totals of some entries, and look for the entry in which the count from above passes what is
wanted. An entry that is wanted as a whole ends the search. Then everything above is stored at its
place among those kept, which ascends; of equal ranks the first ones are. Where a thread block has
several rows, it copies the next one to shared memory meanwhile. Teams of a thread block have rows
of their own: one runs while another waits.

The program is assembly, in steps that are functions here: it lives from shared memory's atomics
and from the order of elements in registers, neither of which Mosaic gives. Branches lead forward
only, and each is taken by all threads of a warp; but for those that wait. Thread blocks of a
cluster wait for words that were sent to them: its own barrier costs a fence of all of memory.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_inline as inline
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import cdiv, round_up

__all__ = ["NO_CANDIDATE", "Form", "Shape", "fewest_blocks", "program", "select", "shape_of"]

LEVELS = (21, 11), (10, 11), (0, 10)
"""Lowest bit and number of the bits that each table counts."""

ENTRIES = 2048
"""Of a table."""

TABLE = 4 * ENTRIES + 16
"""Bytes of a table: behind it are counted those that it does not count."""

AREA = 256
"""Bytes of the totals of one step: 32 of warps, then 16 of thread blocks, then 4 words found."""

BARRIERS = 64
"""Bytes of the barriers of a cluster's five steps."""

MOST = 32
"""Ranks of a thread, at most."""

FEW, MANY = 64, 512
"""Rows up to which there are two multiprocessors for each; from which on one has several."""

EAGER = 1 << 20
"""Ranks that are read before it is known which of them a row sees: so few cost next to nothing."""

NEXT = 4 * AREA + 240
"""Where the barrier of the copy of the next row is."""

TEAMS = 8
"""The first of the hardware barriers of teams; Mosaic has 0 to 3."""

SPREAD = 64
"""Thread blocks up to which few rows have eight or four each: those of a cluster start together,
and 128 of clusters of eight took two turns."""

NO_CANDIDATE = -(2**31)
"""The rank of what is none: the lowest."""

NONE = "0x80000000"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a row's cluster: thread blocks, warpgroups of each, and ranks of a thread.

    Or a thread block has several rows at a time, each of which has a team of so many warpgroups,
    which are a power of two.
    """

    blocks: int
    groups: int
    each: int
    teams: int = 1

    @property
    def threads(self) -> int:
        """Of a thread block, or of a team."""
        return 128 * self.groups

    @property
    def block(self) -> int:
        """Ranks of a thread block."""
        return self.threads * self.each

    @property
    def columns(self) -> int:
        """Of a row, at most."""
        return self.blocks * self.block

    @property
    def residents(self) -> int:
        """Thread blocks of a multiprocessor that copy rows ahead, or 0 where none does."""
        groups = self.groups * self.teams
        if self.blocks > 1 or groups < 4:
            return 0
        return 1 if groups == 8 else 2 * (self.each <= 16)

    @property
    def tables(self) -> int:
        """Where the tables begin, in bytes."""
        return self.totals(len(LEVELS)) if self.blocks > 1 else 5 * AREA

    def totals(self, level: int) -> int:
        """Where the totals of a level are, of four threads each, of each block of the cluster."""
        return 5 * AREA + BARRIERS + level * self.blocks * self.threads

    @property
    def counted(self) -> int:
        """Tables: blocks of a cluster may still read the first one while the third is filled."""
        return 2 if self.blocks == 1 else 3

    def table(self, level: int) -> int:
        """Where the table of a level begins; of one thread block the third is the first again."""
        return self.tables + level % self.counted * TABLE

    @property
    def end(self) -> int:
        """Where the tables end."""
        return self.tables + self.counted * TABLE

    @property
    def kept(self) -> int:
        """Where that is what is kept: in a cluster other blocks may still read the tables then."""
        return self.end if self.blocks > 1 else self.tables

    def words(self, k: int, form: "Form") -> int:
        """Of shared memory, for each team, without the row that comes next."""
        kept = 4 * min(k, self.block) * (1 + form.ranked)
        return round_up(max(self.end, self.kept + kept), 16) // 4


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a program is given beside ranks and ends, and whether it stores ranks beside places."""

    starts: bool = False
    origins: bool = False
    places: bool = False
    ranked: bool = False
    numbered: bool = False  # a row's number in starts, ends and origins is another one
    eager: bool = False  # ranks are asked for before the row's end is known
    ahead: bool = False  # the next row is copied to shared memory meanwhile
    whole: bool = False  # the results' rows have the numbers that those in ends have


def shape_of(columns: int, rows: int = 1) -> Shape:
    """The fewest thread blocks, of 512 threads or of 1,024; or a part of one.

    A thread block of 1,024 has a multiprocessor for itself. So has one of 512 whose threads have 32
    ranks each, because they take 67 registers and more; with 16 ranks two such blocks share a
    multiprocessor. So longer rows have 1,024 threads. At most ``FEW`` rows have two blocks of 512
    instead, where 1,024 would leave half of the multiprocessors without work.
    2^25 ranks in rows of 32,768: 70 µs with 1,024 threads, 112 with 512 in two thread blocks or
    parts. 64 rows of them: 9.2 and 8.5.

    Of many rows as many are selected from at a time as the registers hold, 32 ranks a thread: while
    threads of one wait for each other, others run. Short ones have a thread block of 128 each.
    Others share one of 1,024: four rows of 8,192 took 52 µs where two took 62 (2^25 ranks), two of
    16,384 took 93 instead of 132 (2^26). A block of 1,024 limits what the assembler gives a thread.

    At most eight rows have eight thread blocks each, at most 16 have four: one row of 131,072 takes
    6.2 µs with eight blocks of 512 threads, 8.2 with four of 1,024; 16 rows of 32,768 take 5.7 with
    four blocks and 6.7 with two, but 64 rows 11.0 and 7.4 (H200, 2026-11-29).
    """
    if rows >= MANY and columns <= 128 * MOST:
        return fewest_blocks(columns, 1)
    if rows >= MANY and columns <= 512 * MOST:
        groups = 2 if columns <= 256 * MOST else 4
        return replace(fewest_blocks(columns, groups), teams=8 // groups)
    if columns > 512 * MOST:
        most = next((n for n in (8, 4) if rows * n <= SPREAD), 1)
        if columns <= most * 512 * MOST:
            return fewest_blocks(columns, 4, least=most)
    wide = columns > 1024 * MOST or (columns > 512 * MOST and rows > FEW)
    return fewest_blocks(columns, 8 if wide else 4)


def fewest_blocks(columns: int, groups: int, *, least: int = 1) -> Shape:
    """Of so many warpgroups, for one row; ``least`` blocks at least."""
    threads = 128 * groups
    blocks = max(cdiv(columns, threads * MOST), least)
    each = max(round_up(cdiv(columns, threads * blocks), 4), 4)
    return Shape(blocks=blocks, groups=groups, each=each)


@lib.lowered_once("k", "shape", "ranked", "whole")
def select(
    ranks: jax.Array,
    starts: jax.Array | None,
    ends: jax.Array,
    origins: jax.Array | None = None,
    places: jax.Array | None = None,
    row: jax.Array | None = None,
    into: jax.Array | None = None,
    *,
    k: int,
    shape: Shape,
    ranked: bool = False,
    whole: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``[rows, k]``: places from ``starts`` on of the best of ``ranks`` [rows, columns], ascending.

    A row sees columns ``starts`` (0 if there are none) to ``ends``, of those there are; one that
    sees at most ``k`` takes all, -1 behind them. ``columns`` are a multiple of 4. Places are
    counted from ``origins`` on, if there are any; or ``places`` [rows, columns] has them, and those
    of a row that sees at most ``k`` are its columns. ``starts``, ``ends`` and ``origins`` may be of
    more rows, of which these begin with ``row``, or with the first one. ``ranked``: the ranks too,
    ``NO_CANDIDATE`` where the place is -1. ``whole``: the result has a row for each of ``ends``,
    and the others are those of ``into``, or anything.
    """
    rows, columns = ranks.shape
    assert columns % 4 == 0 and columns <= shape.columns
    assert places is None or (starts is None and origins is None)
    workers, teams = shape.residents * DeviceInfo.current().sms, shape.teams
    ahead = 0 < workers * teams < rows
    form = Form(
        starts=starts is not None,
        origins=origins is not None,
        places=places is not None,
        ranked=ranked,
        numbered=row is not None,
        eager=not ahead and rows * columns <= EAGER,
        ahead=ahead,
        whole=whole,
    )
    facts = {"k": k, "columns": columns, "shape": shape, "form": form}
    out = jax.ShapeDtypeStruct((len(ends) if whole else rows, k), jnp.int32)
    words = shape.words(k, form) + columns * form.ahead
    kernel = lib.kernel(
        functools.partial(_rows, rows=rows, **facts),
        out_type=(out, out) if ranked else out if into is None else (),
        scratch_types={"table": plgpu.SMEM((teams * words,), jnp.int32)},
        grid=(workers if form.ahead else cdiv(rows, teams),),
        grid_names=("row",),
        cluster=(shape.blocks,),
        cluster_names=("part",),
        num_threads=teams * shape.groups,
        thread_name="wg",
        kernel_name="mla_select",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    numbers = None if row is None else row.reshape(1)
    given = (ends if x is None else x for x in (starts, ends, origins, places, numbers))
    if into is None:
        return kernel(ranks, *given)
    return lib.in_place(kernel, (ranks, *given), [into])[0]


def _rows(
    ranks_g, starts_g, ends_g, origins_g, places_g, row_g, *chosen_g,
    rows, k, columns, shape, form, table,
) -> None:  # fmt: skip
    """A row, or, where the next one is copied meanwhile, one row after another."""
    chosen, best = chosen_g[0], chosen_g[-1]
    refs = ranks_g, starts_g, ends_g, origins_g, places_g, chosen, best, table
    team, count = lax.div(lax.axis_index("wg"), shape.groups), shape.teams * lax.axis_size("row")
    first = shape.teams * lax.axis_index("row") + team

    def call(code: str, *numbers) -> None:
        @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 8, *(inline.SCALAR,) * len(numbers)))
        def run(_, *operands):
            pointers = [mgpu.utils.memref_ptr(r) for r in operands[:8]]
            values = [x.registers.item() for x in operands[8:]]
            kinds = ",".join("l" * len(pointers) + "r" * len(values))
            inline.asm(code, [*pointers, *values], kinds + ",~{memory}")

        run(*refs, *numbers)

    def one(row, *more) -> None:
        number = row_g[0] + row if form.numbered else row
        call(program(k, columns, shape, form), row, number, *more)

    def several() -> None:
        call(first_copy(k, columns, shape, form), first)

        @pl.loop(0, lax.div(rows - 1 - first, count) + 1)
        def _(i):
            row = first + i * count
            one(row, jnp.where(row + count < rows, row + count, -1), i & 1)

    # Launched while the kernel before ends: from here on what that wrote may be read.
    plgpu.griddepcontrol_wait()
    mine = several if form.ahead else lambda: one(first)
    if shape.teams == 1:
        mine()
    else:
        pl.when(first < rows)(mine)


def program(k: int, columns: int, shape: Shape, form: Form) -> str:
    """Operands: ranks, starts, ends, origins, places, chosen, their ranks, table, the row, and its
    number in starts, ends and origins; where rows are copied ahead, the next row or -1, and the
    parity of the own one's copy.

    Those that ``form`` does not have are not read.
    """
    registers = ", ".join(f"x{i}" for i in range(shape.each))
    start = "ld.global.b32 start, [out]; max.s32 start, start, 0;"
    clear = _zeros(shape.tables, shape.counted * TABLE, shape) + _sync(shape)
    return f"""{{
        .reg .pred p, q;
        .reg .b32 {registers};
        .reg .b32 tid, lane, warp, part, start, end, origin, count, place, table, wanted, base;
        .reg .b32 team, before, earlier, some, all, mine, found, t, u, v, four, minus;
        .reg .b32 h<{max(ENTRIES // shape.threads, shape.groups, 2)}>, e<4>, c<2>, i<2>;
        .reg .b64 at, out, to, best;
        {_thread(k, columns, shape, form)}
        shr.u32 warp, tid, 5;
        {_of_warp("warp") if shape.blocks > 1 else ""}
        {"mov.u32 part, %cluster_ctarank;" if shape.blocks > 1 else "mov.u32 part, 0;"}
        {_FACTORS}
        {_ask(columns, shape, eager=True) if form.eager else ""}
        mul.wide.s32 at, $9, 4;
        add.u64 out, at, $1;
        {start if form.starts else "mov.b32 start, 0;"}
        add.u64 out, at, $3;
        {"ld.global.b32 origin, [out];" if form.origins else "mov.b32 origin, start;"}
        add.u64 out, at, $2;
        ld.global.b32 end, [out];
        {_barriers(shape)}
        {_take(k, columns, shape, form) if form.ahead else ""}
        {clear if form.eager else ""}
        min.s32 end, end, {columns};
        sub.s32 count, end, start;
        setp.le.s32 p, count, {k};
        @p bra EVERYTHING;
        {"" if form.eager or form.ahead else _ask(columns, shape, eager=False)}
        {"" if form.eager else clear}
        {_all_began(shape)}
        {_mask(shape)}
        mov.u32 wanted, {k};
        mov.u32 base, 0;
        {" ".join(_level(n, shape) for n in range(3))}
        {_scan(3, "eq", shape)}
        {_drop(shape)}
        KNOWN:
        {_scan(4, "ge", shape)}
        {_store(k, columns, shape, form)}
        bra END;
        EVERYTHING:
        {_all_began(shape)}
        {_everything(k, columns, shape, form)}
        END:
        }}"""


def _thread(k: int, columns: int, shape: Shape, form: Form) -> str:
    """``tid``, ``lane``, and where shared memory begins: those of a team, if there are several."""
    lines = "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; cvt.u32.u64 table, $7;"
    if shape.teams == 1:
        return lines
    size = 4 * (shape.words(k, form) + columns * form.ahead)
    return f"""
        {lines}
        shr.u32 team, tid, {int(math.log2(shape.threads))}; and.b32 tid, tid, {shape.threads - 1};
        {_of_warp("team")}
        mad.lo.u32 table, team, {size}, table; add.u32 team, team, {TEAMS};
        """


def _of_warp(x: str) -> str:
    """``x``, the same in all lanes: so the assembler knows it too, and that branches by it are."""
    return f"""
        setp.eq.u32 p, lane, 0; selp.b32 {x}, {x}, 0, p;
        redux.sync.add.s32 {x}, {x}, 0xffffffff;
        """


def _sync(shape: Shape) -> str:
    """All threads of the thread block, or of the team, wait for each other."""
    return "bar.sync 0;" if shape.teams == 1 else f"bar.sync team, {shape.threads};"


_FACTORS = f"mov.b32 minus, -1; {_of_warp('minus')} mul.lo.u32 four, minus, -4;"
"""``four`` and ``minus`` are 4 and -1, which the assembler does not know. So it multiplies by them.

Shifts, comparisons and most additions run in one unit, a warp's in two cycles, products in another
one. Half of the additions as products: both units are busy as long, and shorter.
"""


def _more(to: str, x: str, n: int) -> str:
    """``to = x + n`` in the unit of products."""
    return f"mad.lo.u32 {to}, minus, {-n}, {x};"


def _ask(columns: int, shape: Shape, *, eager: bool) -> str:
    """``x0``, …: of each 128 columns of a warp a lane has four side by side.

    ``place`` is the column of ``x0``. ``eager``: of all columns there are, seen or not.
    """
    lines = [
        f"mul.lo.u32 place, part, {shape.block};",
        f"mad.lo.u32 place, warp, {32 * shape.each}, place;",
        "mad.lo.u32 place, lane, 4, place;",
        f"mul.wide.s32 at, $8, {4 * columns};",
        "add.u64 at, at, $0;",
        "mad.wide.u32 at, place, 4, at;",
    ]
    if not eager:
        lines.append("sub.s32 u, start, place; sub.s32 v, end, place;")
    for i in range(0, shape.each, 4):
        n = 32 * i
        lines += [f"mov.b32 x{i + j}, {NONE};" for j in range(4)]
        if eager:
            lines.append(f"setp.lt.s32 p, place, {columns - n};")
        else:
            lines.append(f"setp.gt.s32 p, v, {n}; setp.lt.and.s32 p, u, {n + 4}, p;")
        lines.append(f"@p ld.global.v4.b32 {{x{i}, x{i + 1}, x{i + 2}, x{i + 3}}}, [at+{4 * n}];")
    return " ".join(lines)


def first_copy(k: int, columns: int, shape: Shape, form: Form) -> str:
    """Copy the first row of a thread block to shared memory. Operands: those of ``program``."""
    return f"""{{
        .reg .pred p;
        .reg .b32 tid, lane, table, team, u;
        .reg .b64 at, out;
        {_thread(k, columns, shape, form)}
        setp.eq.u32 p, tid, 0;
        @p mbarrier.init.shared.b64 [table+{NEXT}], 1;
        @p fence.proxy.async.shared::cta;
        {_copy("$8", k, columns, shape, form)}
        {_sync(shape)}
        }}"""


def _copy(row: str, k: int, columns: int, shape: Shape, form: Form) -> str:
    """Begin to copy a row, where ``p``.

    The L2 cache need not keep it, so that it keeps what was written last and not yet read.
    """
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    size = 4 * columns
    return f"""
        mul.wide.s32 at, {row}, {size}; add.u64 at, at, $0;
        add.u32 u, table, {4 * shape.words(k, form)};
        @p mbarrier.arrive.expect_tx.shared.b64 _, [table+{NEXT}], {size};
        createpolicy.fractional.L2::evict_first.b64 out, 1.0;
        @p {copy} [u], [at], {size}, [table+{NEXT}], out;
        """


def _take(k: int, columns: int, shape: Shape, form: Form) -> str:
    """``x0``, …, as ``_ask``, once the row is there; then the next one may come."""
    wait = "mbarrier.try_wait.parity.shared.b64"
    lines = [
        f"COMES: {wait} p, [table+{NEXT}], $11; @!p bra COMES;",
        f"mul.lo.u32 place, warp, {32 * shape.each}; mad.lo.u32 place, lane, 4, place;",
        f"mad.lo.u32 u, place, 4, table; add.u32 u, u, {4 * shape.words(k, form)};",
    ]
    for i in range(0, shape.each, 4):
        n, only = 32 * i, ""
        if columns < shape.block:
            only = "@p"
            lines += [f"mov.b32 x{i + j}, {NONE};" for j in range(4)]
            lines.append(f"setp.lt.s32 p, place, {columns - n};")
        vector = f"{{x{i}, x{i + 1}, x{i + 2}, x{i + 3}}}"
        lines.append(f"{only} ld.shared.v4.b32 {vector}, [u+{4 * n}];")
    lines.append(f"{_sync(shape)} setp.eq.u32 p, tid, 0; setp.ge.and.s32 p, $10, 0, p;")
    lines.append(_copy("$10", k, columns, shape, form))
    return " ".join(lines)


def _mask(shape: Shape) -> str:
    """What the row does not see is ``NONE``. ``start`` and ``end`` count from ``x0`` on now."""
    lines = [
        f"mul.lo.u32 t, part, {shape.block}; sub.s32 u, start, t; sub.s32 v, end, t;",
        # q: the thread block sees all of its columns
        "setp.le.s32 q, u, 0;",
        f"setp.ge.and.s32 q, v, {shape.block}, q;",
        "sub.s32 start, start, place;",
        "sub.s32 end, end, place;",
        "@q bra SEEN;",
    ]
    for i in range(shape.each):
        n = 32 * (i // 4 * 4) + i % 4
        lines.append(f"setp.gt.s32 p, end, {n}; setp.le.and.s32 p, start, {n}, p;")
        lines.append(f"selp.b32 x{i}, x{i}, {NONE}, p;")
    lines.append("SEEN: add.s32 start, start, 0;")
    return " ".join(lines)


def _zeros(first: int, size: int, shape: Shape) -> str:
    """Zeros in shared memory, from byte ``first`` on."""
    lines = ["mov.b32 t, 0; mad.lo.u32 u, tid, 16, table;"]
    for n in range(0, size, 16 * shape.threads):
        lines.append(f"setp.lt.u32 p, tid, {(size - n) // 16};")
        lines.append(f"@p st.shared.v4.b32 [u+{first + n}], {{t, t, t, t}};")
    return " ".join(lines)


def _barriers(shape: Shape) -> str:
    """Of a cluster, one for each step: it lets go when all blocks have sent what it waits for."""
    if shape.blocks == 1:
        return ""
    lines = ["setp.eq.u32 p, tid, 0;"]
    for step in range(5):
        count = shape.blocks * (shape.threads // 4 if step < len(LEVELS) else 1)
        at = f"[table+{5 * AREA + 8 * step}]"
        lines.append(f"@p mbarrier.init.shared.b64 {at}, 1;")
        lines.append(f"@p mbarrier.arrive.expect_tx.shared.b64 _, {at}, {4 * count};")
    lines.append("@p fence.mbarrier_init.release.cluster;")
    lines.append("barrier.cluster.arrive.relaxed.aligned;")
    return " ".join(lines)


def _all_began(shape: Shape) -> str:
    """All blocks of the cluster have come to the end of ``_barriers``."""
    return "barrier.cluster.wait.aligned;" if shape.blocks > 1 else ""


def _send(x: str, step: int, to: str, shape: Shape, *, thread: str = "lane") -> str:
    """``x`` to the address ``to`` of each thread block, by the ``thread`` of its number."""
    return f"""
        mov.b32 u, {thread}; setp.lt.u32 p, u, {shape.blocks};
        {_sent(x, step, to)}
        """


def _sent(x: str, step: int, to: str) -> str:
    """``x`` to the address ``to`` of thread block ``u``, where ``p``."""
    return f"""
        selp.b32 u, u, 0, p; mapa.shared::cluster.u32 t, {to}, u;
        add.u32 v, table, {5 * AREA + 8 * step}; mapa.shared::cluster.u32 v, v, u;
        @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [t], {x}, [v];
        """


def _received(step: int) -> str:
    """All thread blocks have sent their words of this step."""
    wait = "mbarrier.try_wait.parity.acquire.cluster.shared.b64"
    return f"WAIT{step}: {wait} p, [table+{5 * AREA + 8 * step}], 0; @!p bra WAIT{step};"


def _level(level: int, shape: Shape) -> str:
    """Count the next bits of the ranks from ``base`` on that agree with it; choose their value.

    ``wanted`` are the best of these. The search ends where a value is wanted as a whole: what is
    kept is not below ``base``. Behind the last level ``wanted`` of the ranks ``base`` are kept.
    """
    low, bits = LEVELS[level]
    entries, area, unused = shape.table(level), level * AREA, ENTRIES - (1 << bits)
    # The last entries are used. What is a little below ``base`` counts before them: no matter.
    lines = []
    if level + 1 == shape.counted < len(LEVELS):
        lines.append(_zeros(shape.table(level + 1), TABLE, shape))
    lines.append(f"add.u32 u, table, {entries}; sub.u32 base, base, {unused << low};")
    lines.append(f"shr.u32 v, base, {low};")
    for i in range(shape.each):
        lines.append(f"shr.u32 t, x{i}, {low};" if low else f"mov.b32 t, x{i};")
        if level:
            # The assembler makes a branch of a predicate here: the others count at a place of no
            # use.
            lines.append(f"sub.u32 t, t, v; min.u32 t, t, {ENTRIES};")
        lines.append("mad.lo.u32 t, t, four, u; red.shared.add.u32 [t], 1;")
    # The best value is entry 2047; as integers with a sign the upper half comes first.
    some, flip = ENTRIES // shape.threads, 1 << (bits - 1) if level == 0 else 0
    lines += [
        _sync(shape),
        _entries("tid", some, flip, entries),
        _own_entries(some),
        _summed(some),
        *(_of_block(area, shape) if shape.blocks == 1 else _of_cluster(level, some, flip, shape)),
        "add.u32 t, before, some;",
        "setp.lt.u32 p, before, wanted; setp.ge.and.u32 p, t, wanted, p;",
    ]
    lines += [
        f"add.u32 found, mine, {some - 1};",
        _passed([f"h{n}" for n in reversed(range(some))], -1),
        f"@p st.shared.v4.b32 [table+{area + 192}], {{found, before, all, found}};",
        f"FOUND{level}:" if shape.blocks > 1 else "",
        _sync(shape),
        f"ld.shared.v4.b32 {{found, before, all, t}}, [table+{area + 192}];",
        "sub.u32 wanted, wanted, before;",
        f"xor.b32 found, found, {1 << (bits - 1)};" if level == 0 else "",
        f"mad.lo.u32 base, found, {1 << low}, base;",
        "setp.eq.u32 p, all, wanted;",
        "@p bra KNOWN;",
    ]
    return " ".join(lines)


def _entries(number: str, some: int, flip: int, table: int) -> str:
    """``mine``: the first of the ``number``th ``some`` entries from the top; ``u``: its address."""
    return f"""
        mad.lo.u32 mine, {number}, {-some & 0xFFFFFFFF}, {ENTRIES - some};
        xor.b32 v, mine, {flip};
        mad.lo.u32 u, v, 4, table; add.u32 u, u, {table};
        """


def _summed(some: int) -> str:
    """``some``: the sum of ``h0``, …"""
    return "add.u32 some, h0, h1;" + "".join(f"add.u32 some, some, h{n};" for n in range(2, some))


def _of_block(area: int, shape: Shape) -> list[str]:
    """``before``: the sum of all entries above a thread's ``some``."""
    return [
        _scanned("some", "before"),
        "mad.lo.u32 t, warp, 4, table; setp.eq.u32 p, lane, 31;",
        f"@p st.shared.b32 [t+{area}], before;",
        "sub.u32 before, before, some;",
        _sync(shape),
        _warps(area, shape),
        "add.u32 before, before, t;",
    ]


def _of_cluster(level: int, some: int, flip: int, shape: Shape) -> list[str]:
    """The same for four lanes of the first warp, of entries that pass ``wanted``.

    Each four threads send the total of their entries to all thread blocks. The first warp of each
    adds these up, finds the four whose entries pass ``wanted``, reads these in all tables, a block
    by each four lanes, and adds them up.
    """
    totals, each = shape.totals(level), shape.groups
    lines = [
        _summed_lanes("some", (1, 2)),
        f"mad.lo.u32 t, part, {shape.threads}, table; and.b32 u, tid, {-4 & 0xFFFFFFFF};",
        f"add.u32 t, t, u; add.u32 mine, t, {totals}; and.b32 all, lane, 3;",
    ]
    for first in range(0, shape.blocks, 4):
        lines.append(f"add.u32 u, all, {first}; setp.lt.u32 p, u, {shape.blocks};")
        lines.append(_sent("some", level, "mine"))
    lines += [
        f"setp.ne.u32 p, warp, 0; @p bra FOUND{level};",
        _received(level),
        f"mad.lo.u32 u, lane, {4 * each}, table;",
        _total([totals + block * shape.threads for block in range(shape.blocks)], each),
        _summed(each),
        _scanned("some", "before"),
        "sub.u32 before, before, some; add.u32 t, before, some;",
        "setp.lt.u32 p, before, wanted; setp.ge.and.u32 p, t, wanted, p;",
        f"mul.lo.u32 found, lane, {each};",
        _passed([f"h{n}" for n in range(each)], 1),
        "selp.b32 u, found, 0, p; redux.sync.add.s32 found, u, 0xffffffff;",
        "selp.b32 u, before, 0, p; redux.sync.add.s32 earlier, u, 0xffffffff;",
        "and.b32 t, lane, 3; mad.lo.u32 found, found, 4, t;",
        _entries("found", some, flip, shape.table(level)),
        f"shr.u32 t, lane, 2; setp.lt.u32 p, t, {shape.blocks}; selp.b32 t, t, 0, p;",
        "mapa.shared::cluster.u32 u, u, t;",
        *(f"mov.b32 h{n}, 0;" for n in range(some)),
    ]
    wide, vectors = _vectors(some)
    lines += [f"@p ld.shared::cluster.v{wide}.b32 {{{x}}}, [u+{n}];" for n, x in vectors]
    lines += [_summed_lanes(f"h{n}", (4, 8, 16)) for n in range(some)]
    lines += [
        _summed(some),
        _scanned("some", "before", 4),
        "sub.u32 before, before, some; add.u32 before, before, earlier;",
        "setp.lt.u32 p, lane, 4; selp.b32 some, some, 0, p;",
    ]
    return lines


def _passed(counts: list[str], step: int) -> str:
    """``all``: the first of ``counts`` with which ``before`` reaches ``wanted``.

    ``before`` grows by each count that is skipped. ``found`` is the number of the first count, and
    becomes that of ``all``: each number is ``step`` more than the one before.
    """
    lines = [f"mov.b32 all, {counts[0]};"]
    for x in counts[1:]:
        lines.append("add.u32 t, before, all; setp.lt.u32 q, t, wanted; @q mov.b32 before, t;")
        lines.append(f"@q add.u32 found, found, {step}; @q mov.b32 all, {x};")
    return " ".join(lines)


def _vectors(some: int) -> tuple[int, list[tuple[int, str]]]:
    """How ``h0``, … are read: words of a vector, and the offset and the names of each vector."""
    wide = min(some, 4)
    firsts = range(0, some, wide)
    return wide, [(4 * n, ", ".join(f"h{n + i}" for i in range(wide))) for n in firsts]


def _own_entries(some: int) -> str:
    """``h0``, …: ``some`` words from the address ``u`` on."""
    wide, vectors = _vectors(some)
    return " ".join(f"ld.shared.v{wide}.b32 {{{x}}}, [u+{n}];" for n, x in vectors)


def _total(places: list[int], some: int) -> str:
    """``h0``, …: sums of ``some`` words from each of the places behind ``u`` on."""
    wide, vectors = _vectors(some)
    lines = [f"mov.b32 h{n}, 0;" for n in range(some)]
    names = ", ".join(f"e{i}" for i in range(wide))
    for at in places:
        for n, _ in vectors:
            lines.append(f"ld.shared.v{wide}.b32 {{{names}}}, [u+{at + n}];")
            lines += [f"add.u32 h{n // 4 + i}, h{n // 4 + i}, e{i};" for i in range(wide)]
    return " ".join(lines)


def _summed_lanes(x: str, distances: tuple[int, ...]) -> str:
    """``x``: its sum over lanes whose numbers differ in the bits of ``distances``."""
    shuffle, everyone = "shfl.sync.bfly.b32", "31, 0xffffffff"
    return " ".join(f"{shuffle} t, {x}, {n}, {everyone}; add.u32 {x}, {x}, t;" for n in distances)


def _scanned(x: str, to: str, lanes: int = 32) -> str:
    """``to``: the sum of ``x`` up to the own lane, of each so many lanes."""
    lines, own = [f"mov.b32 {to}, {x};"], (32 - lanes) << 8  # as the instruction wants it
    for n in (1 << i for i in range((lanes - 1).bit_length())):
        lines.append(f"shfl.sync.up.b32 t|p, {to}, {n}, {own}, 0xffffffff;")
        lines.append(f"@p add.u32 {to}, {to}, t;")
    return " ".join(lines)


def _warps(area: int, shape: Shape) -> str:
    """``t``: the sum of what warps before the own one stored in the area, ``all``: of all."""
    return f"""
        mad.lo.u32 t, lane, 4, table;
        ld.shared.b32 t, [t+{area}];
        setp.lt.u32 p, lane, {shape.threads // 32};
        selp.b32 u, t, 0, p;
        redux.sync.add.s32 all, u, 0xffffffff;
        setp.lt.u32 p, lane, warp;
        selp.b32 t, t, 0, p;
        redux.sync.add.s32 t, t, 0xffffffff;
        """


def _scan(step: int, kept: str, shape: Shape) -> str:
    """How many ranks of the thread block that are ``kept`` (compared with ``base``) lie where.

    ``c``: bytes, of each four of a thread's the number of those kept in lanes before it; ``i``:
    in the whole warp. ``before``: those in warps before, ``all``: all; a cluster's are sent.
    """
    area, words = step * AREA, (shape.each + 15) // 16
    lines = []
    for w in range(words):
        lines.append(f"mov.b32 c{w}, 0;")
        for i in range(16 * w, min(16 * w + 16, shape.each)):
            lines.append(f"setp.{kept}.s32 p, x{i}, base;")
            lines.append(f"@p {_more(f'c{w}', f'c{w}', 1 << (8 * (i // 4 % 4)))}")
        lines.append(_scanned(f"c{w}", f"i{w}"))
        lines.append(f"sub.u32 c{w}, i{w}, c{w};")
        lines.append(f"shfl.sync.idx.b32 i{w}, i{w}, 31, 31, 0xffffffff;")
    lines.append("mov.b32 some, 0;")
    lines += [f"dp4a.u32.u32 some, i{w}, 0x01010101, some;" for w in range(words)]
    lines += [
        "mad.lo.u32 t, warp, 4, table; setp.eq.u32 p, lane, 0;",
        f"@p st.shared.b32 [t+{area}], some;",
        # Else the assembler keeps the comparisons as bits of a register, which takes longer than
        # comparing again.
        f"setp.eq.u32 p, tid, 0; @p st.shared.b32 [table+{area + 192}], base;",
        _sync(shape),
        f"ld.shared.b32 base, [table+{area + 192}];",
        _warps(area, shape),
        "mov.b32 before, t;",
    ]
    if shape.blocks > 1:
        lines.append(f"mad.lo.u32 t, part, 4, table; add.u32 t, t, {area + 128};")
        lines.append(_send("all", step, "t", shape, thread="tid"))
    return " ".join(lines)


def _earlier(step: int, shape: Shape) -> str:
    """``earlier``: how many are kept in thread blocks before."""
    if shape.blocks == 1:
        return "mov.b32 earlier, 0;"
    return f"""
        {_received(step)}
        mad.lo.u32 t, lane, 4, table; setp.lt.u32 p, lane, part; mov.b32 u, 0;
        @p ld.shared.b32 u, [t+{step * AREA + 128}];
        redux.sync.add.s32 earlier, u, 0xffffffff;
        """


def _groups(shape: Shape):
    """Each four of a thread's ranks, and ``some``: those kept that lie before them."""
    for i in range(0, shape.each, 4):
        w, byte = i // 16, 8 * (i // 4 % 4)
        yield (
            i,
            f"bfe.u32 some, c{w}, {byte}, 8; add.u32 some, some, before;"
            f"bfe.u32 t, i{w}, {byte}, 8; add.u32 before, before, t;",
        )


def _drop(shape: Shape) -> str:
    """Of the ranks ``base`` all but the first ``wanted`` fall below it.

    The lowest of all ranks cannot: there the first ones rise, and ``base`` does.
    """
    lines = [
        _earlier(3, shape),
        "add.u32 before, before, earlier;",
        f"setp.eq.s32 p, base, {NONE}; selp.b32 u, 1, 0, p; selp.b32 v, 0, -1, p;",
        "mov.b32 found, base;",
    ]
    for first, begin in _groups(shape):
        lines.append(begin)
        for i in range(first, first + 4):
            lines.append(f"setp.eq.s32 p, x{i}, found; setp.lt.u32 q, some, wanted;")
            lines.append(
                f"selp.b32 t, u, v, q; @p add.u32 x{i}, x{i}, t; @p add.u32 some, some, 1;"
            )
    lines.append("add.u32 base, base, u;")
    return " ".join(lines)


def _results(k: int, form: Form) -> str:
    """``out`` and ``best``: where the row's places and ranks go."""
    row = "$9" if form.whole else "$8"
    return f"mul.wide.s32 at, {row}, {4 * k}; add.u64 out, at, $5; add.u64 best, at, $6;"


def _store(k: int, columns: int, shape: Shape, form: Form) -> str:
    """Places of what is kept, and its ranks, if ``form`` wants them.

    A thread block first gathers its columns in shared memory, then writes them in order. A warp
    keeps few of its columns: written at once, each store would be an L2 transaction of a few bytes.
    """
    most, ranks = min(k, shape.block), shape.kept + 4 * min(k, shape.block)
    lines = []
    for first, begin in _groups(shape):
        lines.append(begin)
        lines.append("mad.lo.u32 u, some, 4, table;")
        for i in range(first, first + 4):
            lines.append(f"setp.ge.s32 p, x{i}, base; {_more('t', 'place', 32 * first + i % 4)}")
            lines.append(f"@p st.shared.b32 [u+{shape.kept}], t;")
            if form.ranked:
                lines.append(f"@p st.shared.b32 [u+{ranks}], x{i};")
            lines.append(f"@p {_more('u', 'u', 4)}")
    lines += [_sync(shape), _earlier(4, shape)]
    lines.append(_results(k, form))
    lines.append("mad.lo.u32 u, tid, 4, table; add.u32 t, tid, earlier;")
    lines.append("mad.wide.u32 out, t, 4, out; mad.wide.u32 best, t, 4, best;")
    if form.places:
        lines.append(f"mul.wide.s32 at, $8, {4 * columns}; add.u64 at, at, $4;")
    rounds = list(enumerate(range(0, most, shape.threads)))
    for j, n in rounds:  # all loads before all stores
        lines.append(f"add.u32 t, tid, {n}; setp.lt.u32 p, t, all;")
        lines.append(f"@p ld.shared.b32 x{j}, [u+{shape.kept + 4 * n}];")
        if form.places:
            lines.append(f"mad.wide.u32 to, x{j}, 4, at; @p ld.global.b32 x{j}, [to];")
    for j, n in rounds:
        lines.append(f"add.u32 t, tid, {n}; setp.lt.u32 p, t, all;")
        if not form.places:
            lines.append(f"sub.s32 x{j}, x{j}, origin;")
        lines.append(f"@p st.global.b32 [out+{4 * n}], x{j};")
        if form.ranked:
            lines.append(f"@p ld.shared.b32 v, [u+{ranks + 4 * n}];")
            if form.places:
                lines.append(f"setp.lt.s32 q, x{j}, 0; selp.b32 v, {NONE}, v, q;")
            lines.append(f"@p st.global.b32 [best+{4 * n}], v;")
    return " ".join(lines)


def _everything(k: int, columns: int, shape: Shape, form: Form) -> str:
    """A row that sees at most ``k`` columns takes them."""
    lines = [_results(k, form), f"mad.lo.u32 u, part, {shape.threads}, tid;"]
    lines.append("sub.s32 origin, start, origin;")
    if form.ranked:
        lines.append(f"mul.wide.s32 at, $8, {4 * columns}; add.u64 at, at, $0;")
        lines.append("mad.wide.u32 at, start, 4, at;")
    for n in range(0, k, shape.threads * shape.blocks):
        lines += [
            f"add.u32 t, u, {n};",
            f"setp.lt.u32 p, t, {k};",
            "setp.lt.and.s32 q, t, count, p;",
            "add.s32 v, t, origin; selp.b32 v, v, -1, q;",
            "mad.wide.u32 to, t, 4, out;",
            "@p st.global.b32 [to], v;",
        ]
        if form.ranked:
            lines += [
                f"mov.b32 v, {NONE}; mad.wide.u32 to, t, 4, at;",
                "@q ld.global.b32 v, [to];",
                "mad.wide.u32 to, t, 4, best;",
                "@p st.global.b32 [to], v;",
            ]
    return " ".join(lines)
