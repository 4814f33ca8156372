"""New token records to their slots on Hopper: Pallas Mosaic GPU, in place.

Computes ``ref.write_latent``. A thread block has ``tile`` tokens, each of its four warps a
quarter of them: these come in two bulk copies (latent, rotary part) and leave row by row, two
bulk copies to each slot of the cache, one if quantised::

  load -> wait -> [quantise] -> copy each row -> end, when shared memory has been read

No warp waits for another. Where there are fewer rows than a warp takes, it begins early and
skips the rows of its neighbour. The bound is the copy bandwidth of the chip:
``docs/kernels/cache_io.md``.
"""

# Mosaic GPU states its types in part only.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.cache_io import units_sm90 as units
from mla_jax.types import Array, Float, Int, cdiv

__all__ = ["scratch", "write"]

WARPS = 4
RESERVED = 44 * 1024
"""Bytes of shared memory that a thread block takes at least: five of them side by side are best."""
SAFE = 60  # scales of 2**-60 to 2**60 are divided by with a reciprocal
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # makes a contiguous copy a bulk copy


def scratch(
    dtypes: tuple[DTypeLike, DTypeLike],
    stored: DTypeLike,
    *,
    tile: int,
    widths: tuple[int, int],
    quantised: bool,
) -> dict:
    """Shared memory and barriers of one thread block; ``widths`` are rank and rope."""
    buffers = {
        "latent": plgpu.SMEM((tile, widths[0]), dtypes[0]),
        "rope": plgpu.SMEM((tile, widths[1]), dtypes[1]),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=WARPS),  # copy engine -> warp
    }
    if quantised:
        buffers["codes"] = plgpu.SMEM((tile, sum(widths)), stored)
    free = RESERVED - lib.shared_bytes(buffers)
    if free > 0:
        buffers["reserved"] = plgpu.SMEM((free,), jnp.int8)
    return buffers


@lib.lowered_once("quantised", "tile", "interpret")
def write(
    pages: Float[Array, "*layers pages page row"],
    scale: Float[Array, "*layers"],
    kv_latent: Float[Array, "latents rank"],
    k_rope: Float[Array, "ropes rope"],
    slots: Int[Array, "tokens"],
    *,
    quantised: bool,
    tile: int,
    layer: Int[Array, ""] | None = None,
    interpret: object = None,
) -> Float[Array, "*layers pages page row"]:
    """``ref.write_latent``; a plain cache has the dtype of the data.

    The result is the buffer of ``pages`` where XLA may reuse it, that is where the caller
    donates it; otherwise XLA copies the whole cache first.
    """
    widths = kv_latent.shape[1], k_rope.shape[1]
    dtypes = kv_latent.dtype, k_rope.dtype
    body, of_layer = lib.with_layer(
        functools.partial(_body, tile=tile, simulate=interpret is not None), layer
    )
    kernel = lib.kernel(
        body,
        out_type=(),
        scratch_types=scratch(dtypes, pages.dtype, tile=tile, widths=widths, quantised=quantised),
        grid=(cdiv(slots.shape[0], tile),),
        grid_names=("block",),
        kernel_name="mla_write",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    operands = *of_layer, kv_latent, k_rope, slots, scale.reshape(-1)
    (rows,) = lib.in_place(kernel, operands, [pages.reshape(-1, pages.shape[-1])])
    return rows.reshape(pages.shape)


def _encode(src, scale, dst, at: int, *, simulate: bool) -> None:
    """``dst[:, at:] = CacheFormat.encode(src)``: the quotient is rounded once, before the cast.

    Each warp has rows of its own, each thread a unit at a time: few registers, hence many thread
    blocks side by side.
    """
    tile, width = src.shape
    if simulate:
        codes = jnp.clip(src[...].astype(jnp.float32) / scale, -448.0, 448.0)
        dst[:, pl.ds(at, width)] = codes.astype(dst.dtype)
        return
    per_row = width // units.UNIT
    mine = tile // WARPS * per_row  # units of a warp
    steps = cdiv(mine, 32)
    thread = units.thread()
    first = lax.div(thread, jnp.int32(32)) * mine
    exact = functools.partial(_quotient, corrections=1 if src.dtype.itemsize == 2 else 2)

    def encode(divide):
        y = jnp.full((units.THREADS * units.UNIT,), scale)
        y = plgpu.layout_cast(y, units.PIECE)

        @pl.loop(0, steps, unroll=math.gcd(steps, 2))
        def _(i):
            unit = first + lax.rem(i * 32 + (thread & 31), jnp.int32(mine))
            row = lax.div(unit, jnp.int32(per_row))
            unit -= row * per_row
            x = units.load(src, row, unit).astype(jnp.float32)
            x = _inline(divide, x, y).astype(dst.dtype)
            units.store(x, dst, row, at // units.UNIT + unit)

    usual = (scale >= 2.0**-SAFE) & (scale <= 2.0**SAFE)
    pl.when(usual)(lambda: encode(exact))
    pl.when(jnp.logical_not(usual))(lambda: encode(_division))


def _inline(f, x: jax.Array, y: jax.Array) -> jax.Array:
    """``f`` of two float32 pieces, in terms of their registers."""
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, units.PIECE)
    return plgpu.inline_mgpu(arg_types=(units.PIECE,) * 2, return_type=result)(f)(x, y)


def _division(_, x, y):
    """``x / y`` to nearest; XLA lets the compiler of a plain ``/`` be off by two units."""
    return x._pointwise(x._lift_fast_instr("div.rn.f32"), y)


def _quotient(_, x, y, *, corrections):
    """``x / y``, if all elements of ``y`` are equal and nothing underflows; as large as 896.

    The remainder is taken negative, so that of an exact quotient it adds ``-0`` and keeps its sign.

    One reciprocal for all, and corrections by the exact remainder. Two make the float32 quotient
    the nearest. One is enough for the byte of a 16-bit ``x``: it is off by less than a unit, and
    of the ties of e4m3 it misses none, as no such quotient lies half a unit beside one.
    """
    fma, negative = (x._lift_fast_instr(name) for name in ("fma.rn.f32", "neg.f32"))
    times = x._lift_fast_instr("mul.rn.f32")
    clip = x._lift_fast_instr("min.NaN.xorsign.abs.f32")
    divisor = y.registers.flat[0]
    inverse = x._lift_fast_instr("rcp.rn.f32")(divisor)
    largest = times(divisor, mgpu.utils.c(896.0, divisor.type))

    def one(a):
        a = clip(a, largest)
        q = times(a, inverse)
        for _ in range(corrections):
            q = fma(fma(q, divisor, negative(a)), negative(inverse), q)
        return q

    return x._pointwise(one)


def _body(
    layer_g, latent_g, rope_g, slots_g, scale_g, rows_g,
    *, tile, simulate, latent, rope, full, codes=None, reserved=None,
):  # fmt: skip
    layers, rank, tokens = scale_g.shape[0], latent_g.shape[1], slots_g.shape[0]
    layer, num_slots = lib.layer_of(layer_g, layers), rows_g.shape[0] // layers
    first_row = layer * num_slots
    if layer_g is not None:  # of a layer that does not exist no slot does
        num_slots = jnp.where(layer_g[0] == layer, num_slots, 0)
    each = tile // WARPS
    size = min(each, tokens)
    block, factor = lax.axis_index("block"), scale_g[layer]

    def begin(warp):
        return block * tile + warp * each

    def start(warp):
        return jnp.minimum(begin(warp), tokens - size)

    def place(warp, j):
        """Of the ``j``-th row; the last rows are those of a neighbour too, which writes them."""
        j = jnp.int32(j)
        return jnp.where(start(warp) + j < begin(warp), -1, slots_g[start(warp) + j])

    places = [[place(warp, j) for warp in range(WARPS)] for j in range(size)]

    @plgpu.warp_map
    def _(warp):
        for src, dst in ((latent_g, latent), (rope_g, rope)):
            plgpu.copy_gmem_to_smem(
                src.at[pl.ds(start(warp), size)],
                dst.at[pl.ds(warp * each, size)],
                full.at[warp],
                oob_mode=IN_BOUNDS,
            )
        plgpu.barrier_wait(full.at[warp])

    sources = (latent, 0), (rope, rank)
    if codes is not None:
        for src, at in sources:
            _encode(src, factor, codes, at, simulate=simulate)
        plgpu.commit_smem() if simulate else units.publish()
        sources = ((codes, 0),)

    @plgpu.warp_map
    def _(warp):
        for j, of_warp in enumerate(places):
            place = of_warp[0]
            for w in range(1, WARPS):
                place = jnp.where(warp == w, of_warp[w], place)

            @pl.when((place >= 0) & (place < num_slots))
            def _(place=place, r=warp * each + j):
                for src, at in sources:
                    src = src.at[r]
                    dst = rows_g.at[first_row + place, pl.ds(at, src.shape[0])]
                    plgpu.copy_smem_to_gmem(src, dst, commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows arrive before the next kernel
