"""Merge the pieces of split requests, in place, and fill the rows of padding tokens.

Computes ``merge.ref`` over the pieces of each row, base 2, float32. The tokens that need it are
a list at the head of ``WorkPlan.merges``; a fixed number of thread blocks walk its rows::

    top = max_p lse_p         out = sum_p 2^(lse_p - top) part_p / sum_p 2^(lse_p - top)

in the order of ``p``, so that bits depend on the pieces alone. With very few rows several
blocks share a row, each with a part of its columns, and have more pieces in flight.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas.dense_decode import work_plan as wp
from mla_jax.types import Array, Float, Int

__all__ = ["combine"]

MULTIPROCESSORS = 132

SHAPES = (  # rows at most, parts of the columns, pieces in flight, blocks of a multiprocessor
    (64, 4, (4, 32), 3),
    (2**31 - 1, 1, (2, 4, 8), 5),
)
LSES = 32
"""Logarithms in flight while their maximum is searched."""


def combine(
    out: Float[Array, "rows rank"],
    lse: Float[Array, "rows"],
    part: Float[Array, "slots tiles 64 rank"],
    part_lse: Float[Array, "slots tiles 64"],
    merges: Int[Array, "list 4"],
    *,
    heads: int,
    early_launch: bool,
    interpret: object = None,
) -> tuple[Float[Array, "rows rank"], Float[Array, "rows"]]:
    """``out`` and natural-log ``lse`` with the rows of split and of padding tokens filled in.

    Rows are ``token * heads + head``; all others are left alone. ``early_launch`` starts the
    kernel while its predecessor runs; it waits for its end before it reads the parts.
    """
    rows = (merges.shape[0] - 1) * heads
    parts, unrolls, resident = next(shape for most, *shape in SHAPES if rows <= most)
    blocks = max(min(rows, MULTIPROCESSORS * resident // parts), 1)
    kernel = plgpu.kernel(
        functools.partial(
            _body,
            heads=heads,
            blocks=blocks,
            parts=parts,
            unrolls=unrolls,
            early_launch=early_launch,
        ),
        out_type=(),
        grid=(blocks, parts),
        grid_names=("block", "part"),
        num_threads=1,
        thread_name="wg",
        kernel_name="mla_dense_decode_combine",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    kernel(part, part_lse, merges, out_ref, lse_ref)
    return jax.freeze(out_ref), jax.freeze(lse_ref)


def _body(
    part_g, part_lse_g, merges_g, out_g, lse_g,
    *, heads, blocks, parts, unrolls, early_launch,
):  # fmt: skip
    block, column = lax.axis_index("block"), lax.axis_index("part")
    width = out_g.shape[1] // parts
    columns = pl.ds(pl.multiple_of(column * width, width), width)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)
    last = merges_g.shape[0] - 1
    rows = merges_g[0, 0] * heads

    def fields(k):
        """What the list says of row ``k`` of it; of its last token behind the end."""
        i = jnp.minimum(lax.div(k, jnp.int32(heads)) + 1, last)
        return tuple(merges_g[i, f] for f in wp.MERGE_FIELDS)

    def merge_row(k, base, n, query, token):
        head = lax.rem(k, jnp.int32(heads))
        x = query * heads + head
        tile, row = lax.div(x, jnp.int32(64)), lax.rem(x, jnp.int32(64))

        def lses(first, count):
            found = [
                part_lse_g[base + jnp.minimum(first + i, n - 1), tile, row] for i in range(count)
            ]
            return [jnp.where(first + i < n, x, -jnp.inf) for i, x in enumerate(found)]

        def values(first, count):
            at = [base + jnp.minimum(first + i, n - 1) for i in range(count)]
            return [plgpu.load(part_g.at[a, tile, row, columns], layout=layout) for a in at]

        def add(state, found, loaded, top):
            acc, weight = state
            for lse, value in zip(found, loaded, strict=True):
                w = jnp.exp2(lse - top)
                acc, weight = acc + value * w, weight + w
            return acc, weight

        def finite(top):
            return jnp.where(top == -jnp.inf, 0.0, top)

        def store(acc, weight, top):
            inverse = jnp.where(weight > 0.0, 1.0 / weight, 0.0)
            at = token * heads + head
            out_g[at, columns] = (acc * inverse).astype(out_g.dtype)

            @pl.when(column == 0)
            def _():
                lse = (top + jnp.log2(weight)) * math.log(2.0)
                lse_g[at] = jnp.where(weight > 0.0, lse, -jnp.inf)

        start = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout), jnp.float32(0.0)

        @pl.when(n == 0)
        def _():
            store(*start, jnp.float32(0.0))

        def all_at_once(count):
            found, loaded = lses(0, count), values(0, count)
            top = finite(functools.reduce(jnp.maximum, found))
            store(*add(start, found, loaded, top), top)

        for fewer, count in zip((0, *unrolls), unrolls, strict=False):
            pl.when((n > fewer) & (n <= count))(functools.partial(all_at_once, count))

        unroll = unrolls[-1]

        @pl.when(n > unroll)
        def _():
            def search(i, top):
                return functools.reduce(jnp.maximum, lses(i * LSES, LSES), top)

            top = lax.fori_loop(0, _steps(n, LSES), search, jnp.float32(-jnp.inf))
            top = finite(top)

            def step(i, state):
                first = i * unroll
                return add(state, lses(first, unroll), values(first, unroll), top)

            store(*lax.fori_loop(0, _steps(n, unroll), step, start), top)

    first = fields(block)
    if early_launch:
        plgpu.griddepcontrol_wait()

    def step(i, found):
        k = block + i * blocks
        following = fields(k + blocks)
        merge_row(k, *found)
        return following

    lax.fori_loop(0, _steps(jnp.maximum(rows - block, 0), blocks), step, first)


def _steps(n, size):
    return lax.div(n + (size - 1), jnp.int32(size))
