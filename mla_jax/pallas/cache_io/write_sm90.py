"""New token records to their slots on Hopper: Pallas Mosaic GPU, in place.

Computes ``ref.write_latent``. Tiles of ``tile`` tokens pass through a ring of ``stages`` slots;
a tile comes in two bulk copies (latent, rotary part) and leaves row by row, two bulk copies to
each slot of the cache, one if quantised, issued by four warps side by side::

  ahead   load(i + stages) -----------------------------.
  now     wait full -> [quantise] -> copy each row -> slot of i - 1 is free

Blocks take tiles in turn. A last tile that is not full begins early and skips the rows of its
neighbour. The bound is the copy bandwidth of the chip:
``docs/kernels/cache_io.md``.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.types import Array, Float, Int, cdiv

__all__ = ["scratch", "write"]

WARPS = 4
SAFE = 60  # scales of 2**-60 to 2**60 are divided by with a reciprocal
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a contiguous copy a bulk copy


def scratch(
    dtypes: tuple[DTypeLike, DTypeLike],
    stored: DTypeLike,
    *,
    tile: int,
    widths: tuple[int, int],
    stages: int,
    quantised: bool,
) -> dict:
    """Shared memory and barriers of one thread block; ``widths`` are rank and rope."""
    buffers = {
        "latent": plgpu.SMEM((stages, tile, widths[0]), dtypes[0]),
        "rope": plgpu.SMEM((stages, tile, widths[1]), dtypes[1]),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # copy engine -> warpgroup
    }
    if quantised:
        buffers["codes"] = plgpu.SMEM((min(stages, 2), tile, sum(widths)), stored)  # on its way out
    return buffers


def write(
    pages: Float[Array, "pages page row"],
    scale: Float[Array, ""],
    kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"],
    slots: Int[Array, "tokens"],
    *,
    quantised: bool,
    tile: int,
    stages: int,
    workers: int,
    interpret: object = None,
) -> Float[Array, "pages page row"]:
    """``ref.write_latent``; a plain cache has the dtype of the data.

    The result is the buffer of ``pages`` where XLA may reuse it, that is where the caller
    donates it; otherwise XLA copies the whole cache first.
    """
    widths = kv_latent.shape[1], k_rope.shape[1]
    dtypes = kv_latent.dtype, k_rope.dtype
    tiles = cdiv(slots.shape[0], tile)
    buffers = scratch(
        dtypes, pages.dtype, tile=tile, widths=widths, stages=stages, quantised=quantised
    )
    kernel = lib.kernel(
        functools.partial(
            _body, tile=tile, stages=stages, tiles=tiles, simulate=interpret is not None
        ),
        out_type=(),
        scratch_types=buffers,
        grid=(min(workers, tiles),),
        grid_names=("worker",),
        kernel_name="mla_write",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    operands = kv_latent, k_rope, slots, scale.reshape(1)
    (rows,) = lib.in_place(kernel, operands, [pages.reshape(-1, pages.shape[2])])
    return rows.reshape(pages.shape)


def _encode(src, scale, dst, *, simulate: bool) -> None:
    """``dst = CacheFormat.encode(src)``: the quotient is rounded once, before the cast.

    A few rows at a time: few registers, hence many thread blocks side by side.
    """
    tile, width = src.shape
    step = 8 if width % 128 else 4
    layout = plgpu.Layout.WG_STRIDED((step, width), vec_size=4)
    exact = functools.partial(_quotient, corrections=1 if src.dtype.itemsize == 2 else 2)

    def encode(divide):
        largest = 2.0 * float(jnp.finfo(dst.dtype).max) * scale
        y = plgpu.layout_cast(jnp.full((step, width), scale), layout)

        @pl.loop(0, tile // step)
        def _(i):
            part = pl.ds(i * step, step)
            x = plgpu.load(src.at[part], layout=layout).astype(jnp.float32)
            x = jnp.clip(x, -largest, largest)  # no infinity; the cast saturates
            dst[part] = divide(x, y).astype(dst.dtype)

    if simulate:
        encode(lambda x, y: jnp.clip(x / y, -448.0, 448.0))
        return
    usual = (scale >= 2.0**-SAFE) & (scale <= 2.0**SAFE)
    pl.when(usual)(lambda: encode(functools.partial(_inline, exact, layout)))
    pl.when(jnp.logical_not(usual))(lambda: encode(functools.partial(_inline, _division, layout)))


def _inline(f, layout, x: jax.Array, y: jax.Array) -> jax.Array:
    """``f`` of two float32 arrays of one layout, in terms of their registers."""
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout)
    return plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)(f)(x, y)


def _division(_, x, y):
    """``x / y`` to nearest; XLA lets the compiler of a plain ``/`` be off by two units."""
    return x._pointwise(x._lift_fast_instr("div.rn.f32"), y)


def _quotient(_, x, y, *, corrections):
    """``x / y``, if all elements of ``y`` are equal and nothing under- or overflows.

    The remainder is taken negative, so that of an exact quotient it adds ``-0`` and keeps its sign.

    One reciprocal for all, and corrections by the exact remainder. Two make the float32 quotient
    the nearest. One is enough for the byte of a 16-bit ``x``: it is off by less than a unit, and
    of the ties of e4m3 it misses none, as no such quotient lies half a unit beside one.
    """
    fma, negative = (x._lift_fast_instr(name) for name in ("fma.rn.f32", "neg.f32"))
    divisor = y.registers.flat[0]
    inverse = x._lift_fast_instr("rcp.rn.f32")(divisor)

    def one(a):
        q = x._lift_fast_instr("mul.rn.f32")(a, inverse)
        for _ in range(corrections):
            q = fma(fma(q, divisor, negative(a)), negative(inverse), q)
        return q

    return x._pointwise(one)


def _body(
    latent_g, rope_g, slots_g, scale_g, rows_g,
    *, tile, stages, tiles, simulate, latent, rope, full, codes=None,
):  # fmt: skip
    num_rows, rank, tokens = rows_g.shape[0], latent_g.shape[1], slots_g.shape[0]
    size = min(tile, tokens)
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    mine = lax.div(tiles - worker + workers - 1, jnp.int32(workers))
    late = min(stages - 1, 1)  # groups of copies that may still read their slot

    def slot(i):
        return lax.rem(i, jnp.int32(stages))

    def begin(i):
        return (worker + i * workers) * tile

    def start(i):
        return jnp.minimum(begin(i), tokens - size)

    def load(i):
        @pl.when(i < mine)
        def _():
            for src, dst in ((latent_g, latent), (rope_g, rope)):
                plgpu.copy_gmem_to_smem(
                    src.at[pl.ds(start(i), size)],
                    dst.at[slot(i), pl.ds(0, size)],
                    full.at[slot(i)],
                    oob_mode=IN_BOUNDS,
                )

    def send(places, sources):
        """Rows of a tile to their places, one group of each warp; sources: buffer, column."""
        per_warp = tile // WARPS

        @plgpu.warp_map
        def _(warp):
            for j in range(per_warp):
                place = places[j]
                for w in range(1, WARPS):
                    place = jnp.where(warp == w, places[w * per_warp + j], place)
                r = warp * per_warp + j

                @pl.when((place >= 0) & (place < num_rows))
                def _(place=place, r=r):
                    for src, at in sources:
                        src = src.at[r]
                        dst = rows_g.at[place, pl.ds(at, src.shape[0])]
                        plgpu.copy_smem_to_gmem(src, dst, commit_group=False)

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(late, wait_read_only=True)

        plgpu.commit_smem()  # a barrier: every warp has waited

    def step(i, carry):
        first, repeated = start(i), begin(i) - start(i)
        places = [jnp.where(j < repeated, -1, slots_g[first + j]) for j in range(size)]
        places += [jnp.int32(-1)] * (tile - size)
        s, o = slot(i), lax.rem(i, jnp.int32(late + 1))
        plgpu.barrier_wait(full.at[s])
        if codes is None:
            send(places, ((latent.at[s], 0), (rope.at[s], rank)))
            pl.when(i >= late)(lambda: load(i - late + stages))
        else:
            for src, at in ((latent.at[s], 0), (rope.at[s], rank)):
                dst = codes.at[o, :, pl.ds(at, src.shape[1])]
                _encode(src, scale_g[0], dst, simulate=simulate)
            plgpu.commit_smem()  # also: every thread has read the slot
            load(i + stages)
            send(places, ((codes.at[o], 0),))
        return carry

    for i in range(stages):
        load(jnp.int32(i))
    lax.fori_loop(0, mine, step, ())

    @plgpu.warp_map
    def _(_):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows arrive before the next kernel
