"""The experts' products of many e4m3 rows with block-scaled e4m3 weights: Pallas Mosaic GPU.

The roles, tiles and blocks are those of ``grouped_matmul.mosaic_sm90``. A step is 128 channels, one
block of scales: its product has a sum of its own, as the tensor core adds e4m3 products with 13
bits or so, and goes times the scales of its rows and of its block of weights to the sum in float32.
One warpgroup does that while the other one multiplies. Both products of a step are in flight at
once, so a tile has at most 96 rows: two sums and two products of 64 x 96 fill the registers. The
bound: 8192 FLOP a cycle, and 128 bytes a cycle of shared memory, of which a product reads 8 KiB of
weights and 12 KiB of rows.
"""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAbstractUsage=false
# pyright: reportCallIssue=false

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.grouped_matmul import mosaic_sm90 as experts
from mla_jax.pallas.grouped_matmul import tiles as tt
from mla_jax.pallas.grouped_matmul.mosaic_sm90 import CHUNK, F32, Item, Sizes
from mla_jax.types import SCALE_BLOCK, Array, BlockScaled, round_up

__all__ = ["multiply", "scratch"]

COLUMN = plgpu.Layout.WGMMA.reduce(0)
ALIGNED = 32  # float32 numbers: the copy engine writes to multiples of 128 bytes


def scratch(sizes: Sizes, out: Any) -> dict:
    """As for 16-bit weights, and the scales of a step's rows."""
    buffers = experts.scratch(sizes, jnp.float8_e4m3fn, out)
    squares = 2 * experts.GROUPS
    return buffers | {
        "x_scale": plgpu.SMEM((sizes.stages, round_up(sizes.most, ALIGNED)), F32),
        "full": lib.barrier(squares + 2, sizes.stages),  # copy engine -> both
    }


@lib.lowered_once("sizes", "out_dtype", "interpret")
def multiply(
    x: jax.Array, x_scale: jax.Array, weights: tuple[BlockScaled, ...], table: Array, used: Array,
    *, sizes: Sizes, out_dtype: Any, interpret: object = None,
) -> jax.Array:  # fmt: skip
    """The product of every tile with its expert's ``weights``: one, or (gate, up) and SwiGLU.

    ``x`` [rows, channels] e4m3, ``x_scale`` [channels / 128, rows]; ``weights`` [experts, columns,
    channels] each; ``table`` and ``used`` are a plan's. Rows of no tile are not written.
    """
    count = len(weights)
    _, columns, channels = weights[0].shape
    values, scales = [w.values for w in weights], [w.scale for w in weights]
    return experts.launch(
        (x, x_scale, *values, *scales, table, used),
        functools.partial(_roles, count=count),
        sizes=sizes,
        buffers=scratch(sizes, out_dtype),
        out=jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype),
        steps=channels // SCALE_BLOCK,
        gated=count == 2,
        name="mla_fp8_gate_up" if count == 2 else "mla_fp8_down",
        sliced=range(2, 2 + 2 * count),
        told=len(Item._fields),
        interpret=interpret,
    )


def _roles(x_g, x_scale_g, *rest, count, facts, **places):
    values, scales, table = rest[:count], rest[count : 2 * count], rest[2 * count]
    loader = _Loader(x=x_g, x_scale=x_scale_g, weights=values, table=table, **places, **facts)
    return loader, _Multiplier, {"scales": scales}


@dataclass(frozen=True, kw_only=True)
class _Loader(experts.Loader):
    x_scale: Any

    def _square(self, source, k, column):
        return source.at[pl.ds(column, CHUNK), pl.ds(k * SCALE_BLOCK, SCALE_BLOCK)]

    def _load_rows(self, s, k, item: Item, n: int) -> None:
        rows, here, full = pl.ds(item.row * tt.EIGHT, n), pl.ds(0, n), self.refs["full"].at[s]
        piece = self.x.at[rows, pl.ds(k * SCALE_BLOCK, SCALE_BLOCK)]
        plgpu.copy_gmem_to_smem(piece, self.refs["x"].at[s, here], full)
        plgpu.copy_gmem_to_smem(self.x_scale.at[k, rows], self.refs["x_scale"].at[s, here], full)


@dataclass(frozen=True, kw_only=True)
class _Multiplier(experts.Multiplier, lib.Turns):
    scales: Any  # of the weights

    def run(self) -> None:
        pl.when(self.wg == 1)(self._give_turn)  # the first one is that of warpgroup 0
        super().run()
        pl.when(self.wg == 0)(self._take_turn)  # warpgroup 1 has given one more

    def _sums(self, n: int, g, item: Item):
        zeros = lib.tile(0.0, (CHUNK, n), F32)

        def step(k, carry):
            *sums, here, s = carry
            after = self._scales(item, jnp.minimum(k + 1, self.steps - 1))
            plgpu.barrier_wait(self.refs["full"].at[s])
            sums = self._step(n, s, here, sums)
            return *sums, after, jnp.where(s + 1 == self.sizes.stages, 0, s + 1)

        first = self._scales(item, jnp.int32(0))
        *sums, _, _ = lax.fori_loop(0, self.steps, step, (zeros, zeros, first, self.slot(g)))
        return sums

    def _step(self, n: int, s, scales, sums):
        """``sums`` plus both products of a step, each times the scales of its rows and weights.

        The warpgroups issue products in turn. One scales while the products of the other run, and
        its own first product while its second one runs.
        """

        def add(*products):
            for i, product in enumerate(products):
                rows = self.refs["x"].at[s, pl.ds(0, n)]
                w = self.refs["w"].at[s, 2 * self.wg + i]
                lib.matmul(product, w, rows.T, simulate=self.simulate)
            by_row = plgpu.load(self.refs["x_scale"].at[s, pl.ds(0, n)], layout=COLUMN)
            factors = [lax.broadcast_in_dim(by_row * x, (CHUNK, n), [1]) for x in scales]
            self._give_turn()  # given sooner, the assembler computes the factors after the wait
            first = sums[0] + self._landed(products[0], 1) * factors[0]
            if self.simulate:  # the scales are in registers, but a race detector cannot see that
                plgpu.commit_smem()
            last = self._landed(products[1], 0)
            plgpu.barrier_arrive(self.refs["free"].at[s])
            return first, sums[1] + last * factors[-1]

        self._take_turn()
        return pl.run_scoped(add, *2 * [plgpu.ACC((CHUNK, n), F32)])

    def _landed(self, product, later: int):
        """A complete product; the ``later`` ones issued behind it may go on."""
        if self.simulate:
            return product[...]
        return lib.landed(plgpu.wgmma_accumulator_load(product, wait_n=None), later)

    def _scales(self, item: Item, k):
        """Of the blocks of weights of both products, or of the one that both are of."""
        if self.gated:
            block = lax.div(item.column + self.wg * CHUNK, jnp.int32(SCALE_BLOCK))
            return tuple(scale[item.expert, block, k] for scale in self.scales)
        last = self.scales[0].shape[1] - 1  # the last block of columns may be narrower
        block = jnp.minimum(lax.div(item.column, jnp.int32(SCALE_BLOCK)) + self.wg, last)
        return (self.scales[0][item.expert, block, k],)
