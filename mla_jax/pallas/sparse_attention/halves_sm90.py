"""The values of the sparse kernel: ``O += P V`` of half of the columns, and the results."""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.mosaic_lib import ROW
from mla_jax.pallas.sparse_attention import stream_sm90 as shared
from mla_jax.pallas.sparse_attention.stream_sm90 import HALF, ROWS, Buffers, Stream, ring

__all__ = ["Half"]

PART = 128  # columns of a product: one of 256 takes more registers than the launch gives
REGISTERS = 160  # of a thread


@dataclass(frozen=True, kw_only=True)
class Half:
    """Warpgroup 2 or 3."""

    stream: Stream
    buffers: Buffers
    is_right: bool
    early_launch: bool  # of the merge

    @property
    def keys(self) -> Any:
        return self.buffers.right if self.is_right else self.buffers.left

    def run(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        self.stream.walk(self._piece)
        plgpu.wait_smem_to_gmem(0)

    def _piece(self, token, g0, part, _) -> None:
        """Values of all blocks of a token's piece, whose first one is block ``g0``."""
        of, b, keys, simulate = self.stream, self.buffers, self.keys, self.stream.simulate
        n, _ = of.piece_of(token)
        row = of.row_of(token)

        def free(j, s, part):
            freed = b.freed.at[s * of.parts + part]
            pl.when(j < n - 1)(lambda: plgpu.barrier_arrive(freed))

        def step(j, o):
            s = ring(g0 + j)
            plgpu.barrier_wait(b.p_ready.at[s])
            o = self._rescale(o, plgpu.load(b.stats.at[shared.ALPHA + s], layout=ROW))

            def products(acc):
                for k, part in enumerate(acc):
                    values = keys.at[s, :, pl.ds(k * PART, PART)]
                    lib.matmul(part, b.weights.at[s], values, simulate=simulate)
                if of.parts == len(acc):
                    plgpu.wgmma_wait(1)
                    free(j, s, 0)

            o = lib.accumulate(o, products, simulate=simulate)
            free(j, s, of.parts - 1)
            return o

        o = [lib.tile(0.0, (ROWS, PART), jnp.float32) for _ in range(HALF // PART)]
        o = lax.fori_loop(0, n, step, o)
        s, i = ring(g0 + n - 1), of.parity(token)
        plgpu.barrier_wait(b.inverse_ready.at[i])
        inverse = lib.fill_rows(plgpu.load(b.stats.at[shared.INVERSE + i], layout=ROW), PART)
        for k, x in enumerate(o):  # the slot of the last block takes the result
            keys[s, :, pl.ds(k * PART, PART)] = (x * inverse).astype(keys.dtype)
        plgpu.commit_smem()
        out, _, parts, _ = of.results
        pl.when(part < 0)(lambda: self._store(s, out, row))
        pl.when(part >= 0)(lambda: self._store(s, parts, (part * of.tiles + of.tile) * ROWS))
        if self.is_right and self.early_launch:  # sooner, and the merge would only wait longer
            pl.when(token == of.last_token)(plgpu.griddepcontrol_launch_dependents)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(of.parts):
            plgpu.barrier_arrive(b.freed.at[s * of.parts + i])

    def _rescale(self, o: list[jax.Array], shrink) -> list[jax.Array]:
        """``o`` times a factor of each row; all of a warp's are one in most blocks."""

        def scaled():
            return [x * lib.fill_rows(shrink, PART) for x in o]

        if self.stream.simulate:
            return scaled()
        return lax.cond(lib.any_below_one(shrink), scaled, lambda: o)

    def _store(self, s, to, row) -> None:
        """This half of the result, from row ``row`` on."""
        of = self.stream
        columns = pl.ds(HALF if self.is_right else 0, HALF)
        result = self.keys.at[s, pl.ds(0, of.live)]
        to = to.at[:, columns]
        lib.store_rows(result, to, row, of.count, rows=of.live, step=of.step)
