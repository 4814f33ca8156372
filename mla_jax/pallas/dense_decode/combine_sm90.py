"""Merge the pieces of split requests, in place, and fill the rows of padding tokens.

Computes ``merge.ref`` over the pieces of each row, base 2, float32. The tokens that need it are
a list at the head of ``WorkPlan.merges``; a fixed number of thread blocks walk its rows::

    top = max_p lse_p         out = sum_p 2^(lse_p - top) part_p / sum_p 2^(lse_p - top)

With many pieces this is done for each of four interleaved chains of them, and the four are
joined: by one warpgroup or by four, according to the number of rows. Which chains there are,
and every order of summation, depends on the number of pieces alone.
"""

# Mosaic GPU states its types in part only; scratch exists where warpgroups share a row.
# pyright: reportPrivateImportUsage=false
# pyright: reportOptionalSubscript=false
# pyright: reportOptionalMemberAccess=false
# pyright: reportArgumentType=false

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

SHAPES = (  # rows at most, warpgroups of a block, blocks of a multiprocessor
    (2 * MULTIPROCESSORS, 4, 1),
    (2**31 - 1, 1, 5),
)
FEW = (2, 4, 8)
"""Pieces in flight; up to the last of these, all pieces of a row are in flight at once."""

CHAINS = 4
"""More pieces than that are summed in interleaved chains, side by side if there are warpgroups."""


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
    rows, rank = (merges.shape[0] - 1) * heads, out.shape[1]
    warpgroups, resident = next(shape for most, *shape in SHAPES if rows <= most)
    blocks = max(min(rows, MULTIPROCESSORS * resident), 1)
    scratch = {
        "sums": plgpu.SMEM((CHAINS, rank), jnp.float32),
        "states": plgpu.SMEM((CHAINS, 128), jnp.float32),  # maximum, weight
        "ready": plgpu.Barrier(num_arrivals=CHAINS),  # chains -> all: the sums are there
        "free": plgpu.Barrier(num_arrivals=1),  # warpgroup 0 -> all: the sums were read
    }
    kernel = plgpu.kernel(
        functools.partial(
            _body, heads=heads, blocks=blocks, warpgroups=warpgroups, early_launch=early_launch
        ),
        out_type=(),
        scratch_types=scratch if warpgroups > 1 else {},
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
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
    *, heads, blocks, warpgroups, early_launch, sums=None, states=None, ready=None, free=None,
):  # fmt: skip
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    rank = out_g.shape[1]
    layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // 128)
    last = merges_g.shape[0] - 1
    rows = merges_g[0, 0] * heads

    def fields(k):
        """What the list says of row ``k`` of it; of its last token behind the end."""
        i = jnp.minimum(lax.div(k, jnp.int32(heads)) + 1, last)
        return tuple(merges_g[i, f] for f in wp.MERGE_FIELDS)

    def empty():
        zeros = plgpu.layout_cast(jnp.zeros((rank,), jnp.float32), layout)
        return zeros, jnp.float32(0.0), jnp.float32(-jnp.inf)

    def finite(top):
        return jnp.where(top == -jnp.inf, 0.0, top)

    def join(state, other):
        (acc, weight, top), (value, w, t) = state, other
        new = jnp.maximum(top, t)
        a, b = jnp.exp2(top - finite(new)), jnp.exp2(t - finite(new))
        return acc * a + value * b, weight * a + w * b, new

    def merge_row(k, base, n, query, token):
        head = lax.rem(k, jnp.int32(heads))
        x = query * heads + head
        tile, row = lax.div(x, jnp.int32(64)), lax.rem(x, jnp.int32(64))

        def slots(first, stride, count):
            places = [first + i * stride for i in range(count)]
            return places, [base + jnp.minimum(p, n - 1) for p in places]

        def lses(first, stride, count):
            places, at = slots(first, stride, count)
            found = [part_lse_g[a, tile, row] for a in at]
            return [jnp.where(p < n, x, -jnp.inf) for p, x in zip(places, found, strict=True)]

        def values(first, stride, count):
            _, at = slots(first, stride, count)
            return [plgpu.load(part_g.at[a, tile, row], layout=layout) for a in at]

        def add(state, found, loaded):
            acc, weight, top = state
            for lse, value in zip(found, loaded, strict=True):
                w = jnp.exp2(lse - finite(top))
                acc, weight = acc + value * w, weight + w
            return acc, weight, top

        def at_once(first, stride, count):
            found, loaded = lses(first, stride, count), values(first, stride, count)
            acc, weight, _ = empty()
            return add((acc, weight, functools.reduce(jnp.maximum, found)), found, loaded)

        def chain(first):
            """State of pieces ``first, first + CHAINS, ...``: their maximum, then their sum."""
            count = _steps(n - first, CHAINS)

            def search(i, top):
                return functools.reduce(jnp.maximum, lses(first + i * 16 * CHAINS, CHAINS, 16), top)

            def step(i, state):
                p = first + i * FEW[-1] * CHAINS
                return add(state, lses(p, CHAINS, FEW[-1]), values(p, CHAINS, FEW[-1]))

            acc, weight, top = empty()
            top = lax.fori_loop(0, _steps(count, 16), search, top)
            return lax.fori_loop(0, _steps(count, FEW[-1]), step, (acc, weight, top))

        def store(acc, weight, top):
            inverse = jnp.where(weight > 0.0, 1.0 / weight, 0.0)
            at = token * heads + head
            out_g[at] = (acc * inverse).astype(out_g.dtype)
            lse = (top + jnp.log2(weight)) * math.log(2.0)
            lse_g[at] = jnp.where(weight > 0.0, lse, -jnp.inf)

        @pl.when((n == 0) & (wg == 0))
        def _():
            store(*empty())

        for fewer, count in zip((0, *FEW), FEW, strict=False):

            @pl.when((n > fewer) & (n <= count) & (wg == 0))
            def _(count=count):
                store(*at_once(0, 1, count))

        @pl.when(n > FEW[-1])
        def _():
            if warpgroups == 1:
                store(*lax.fori_loop(0, CHAINS, lambda c, s: join(s, chain(c)), empty()))
                return
            sums[wg], states[wg, 0], states[wg, 1] = chain(wg)
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

            @pl.when(wg == 0)
            def _():
                state = empty()
                for c in range(CHAINS):
                    value = plgpu.load(sums.at[c], layout=layout)
                    state = join(state, (value, states[c, 0], states[c, 1]))
                store(*state)
                plgpu.barrier_arrive(free)

            plgpu.barrier_wait(free)

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
