"""Merge the pieces of split requests, in place, and fill the rows of padding tokens.

Computes ``merge.ref`` over the pieces of each row, base 2, float32: one pass over the pieces
with a running maximum. A thread block has ``rows`` rows of one token and four warpgroups: with
few pieces each warpgroup takes whole rows, with many all four share a row. Which of the two,
and every order of summation, depends on the number of pieces alone.

    unsplit token    nothing            padding token    out = 0, lse = -inf
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.types import Array, Float, Int, cdiv

__all__ = ["combine"]

WARPGROUPS = 4
PATHS = (  # pieces at most, all warpgroups share a row, pieces in flight of a warpgroup
    (2, False, 2),
    (8, False, 4),
    (32, True, 4),
    (2**31 - 1, True, 8),
)


def combine(
    out: Float[Array, "rows rank"],
    lse: Float[Array, "rows"],
    part: Float[Array, "slots tiles 64 rank"],
    part_lse: Float[Array, "slots tiles 64"],
    merges: Int[Array, "tokens 3"],
    *,
    heads: int,
    early_launch: bool,
    interpret: object = None,
) -> tuple[Float[Array, "rows rank"], Float[Array, "rows"]]:
    """``out`` and natural-log ``lse`` with the rows of split and of padding tokens filled in.

    Rows are ``token * heads + head``; rows behind the last token are left alone.
    ``early_launch`` starts the kernel while its predecessor ends; it waits before it reads.
    """
    tokens = merges.shape[0]
    rows = _rows_per_block(tokens, heads)
    rank = out.shape[1]
    kernel = plgpu.kernel(
        functools.partial(_body, heads=heads, rows=rows, early_launch=early_launch),
        out_type=(),
        scratch_types={
            "sums": plgpu.SMEM((WARPGROUPS, rank), jnp.float32),
            "states": plgpu.SMEM((WARPGROUPS, 128), jnp.float32),  # maximum, weight
            "ready": plgpu.Barrier(num_arrivals=WARPGROUPS),
            "free": plgpu.Barrier(num_arrivals=1),
        },
        grid=(tokens, heads // rows),
        grid_names=("token", "group"),
        num_threads=WARPGROUPS,
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


def _rows_per_block(tokens: int, heads: int) -> int:
    """Rows that keep about a thousand thread blocks; a power of two that divides heads."""
    rows = 1
    while rows < 16 and tokens * heads > 1024 * rows and heads % (2 * rows) == 0:
        rows *= 2
    return rows


def _body(
    part_g, part_lse_g, merges_g, out_g, lse_g,
    *, heads, rows, early_launch, sums, states, ready, free,
):  # fmt: skip
    if early_launch:
        plgpu.griddepcontrol_wait()
    wg, token, group = (lax.axis_index(n) for n in ("wg", "token", "group"))
    base, n, query = (merges_g[token, i] for i in range(3))
    rank = out_g.shape[1]
    layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // 128)

    def add(state, lses, values):
        """The running state with some more pieces of it."""
        acc, top, weight = state
        new = functools.reduce(jnp.maximum, lses, top)
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        shrink = jnp.exp2(top - safe)
        acc, weight = acc * shrink, weight * shrink
        for x, value in zip(lses, values, strict=True):
            w = jnp.exp2(x - safe)
            acc, weight = acc + value * w, weight + w
        return acc, new, weight

    def empty():
        zeros = plgpu.layout_cast(jnp.zeros((rank,), jnp.float32), layout)
        return zeros, jnp.float32(-jnp.inf), jnp.float32(0.0)

    def pieces(h, first, stride, unroll):
        """State over pieces ``first, first + stride, ...`` of head ``h``."""
        x = query * heads + h
        tile, row = lax.div(x, jnp.int32(64)), lax.rem(x, jnp.int32(64))

        def step(i, state):
            lses, values = [], []
            for u in range(unroll):
                p = first + (i * unroll + u) * stride
                at = base + jnp.minimum(p, n - 1)
                lses.append(jnp.where(p < n, part_lse_g[at, tile, row], -jnp.inf))
                values.append(plgpu.load(part_g.at[at, tile, row], layout=layout))
            return add(state, lses, values)

        count = lax.div(n - first + stride - 1, jnp.int32(stride))
        steps = lax.div(count + unroll - 1, jnp.int32(unroll))
        return lax.fori_loop(0, steps, step, empty())

    def store(h, state):
        acc, top, weight = state
        inverse = jnp.where(weight > 0.0, 1.0 / weight, 0.0)
        out_g[token * heads + h] = (acc * inverse).astype(out_g.dtype)
        lse = (top + jnp.log2(weight)) * math.log(2.0)
        lse_g[token * heads + h] = jnp.where(weight > 0.0, lse, -jnp.inf)

    def own_rows(body):
        @pl.loop(0, cdiv(rows, WARPGROUPS))
        def _(i):
            r = i * WARPGROUPS + wg
            pl.when(r < rows)(lambda: body(group * rows + r))

    @pl.when(n == 0)
    def _():
        own_rows(lambda h: store(h, empty()))

    def shared_rows(unroll):
        @pl.loop(0, rows)
        def _(r):
            acc, top, weight = pieces(group * rows + r, wg, WARPGROUPS, unroll)
            sums[wg], states[wg, 0], states[wg, 1] = acc, top, weight
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

            @pl.when(wg == 0)
            def _():
                state = empty()
                for w in range(WARPGROUPS):
                    acc, top, weight = state
                    new = jnp.maximum(top, states[w, 0])
                    safe = jnp.where(new == -jnp.inf, 0.0, new)
                    a, b = jnp.exp2(top - safe), jnp.exp2(states[w, 0] - safe)
                    value = plgpu.load(sums.at[w], layout=layout)
                    state = acc * a + value * b, new, weight * a + states[w, 1] * b
                store(group * rows + r, state)
                plgpu.barrier_arrive(free)

            plgpu.barrier_wait(free)

    fewer = 1
    for most, shared, unroll in PATHS:

        @pl.when((n > fewer) & (n <= most))
        def _(shared=shared, unroll=unroll):
            if shared:
                shared_rows(unroll)
            else:
                own_rows(lambda h: store(h, pieces(h, 0, 1, unroll)))

        fewer = most
