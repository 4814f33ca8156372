"""What the warpgroups of the sparse kernel share: sizes, buffers, and the walk over tokens."""

# Mosaic GPU states its types in part only; roles are decided while tracing.
# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.cache import RECORD_FORMATS
from mla_jax.pallas import mosaic_lib as lib
from mla_jax.pallas.sparse_attention.feed_sm90 import MARKS, SLOTS, parts_of
from mla_jax.pallas.sparse_attention.line_plan import Line
from mla_jax.pallas.sparse_attention.rows_sm90 import BLOCK, Scope

__all__ = [
    "ALPHA",
    "HALF",
    "INVERSE",
    "LSE",
    "ROWS",
    "TOP",
    "TOTAL",
    "VALUE",
    "Buffers",
    "Stream",
    "ring",
    "scratch",
]

ROWS = 64  # heads of a tile
VALUE = 512  # columns of the value
HALF = VALUE // 2
# Rows of the statistics buffer: of slots, of tokens in turn, of those who score, and of both.
ALPHA, INVERSE, LSE, TOP, TOTAL = range(0, 10, 2)

I32 = jnp.int32
F32 = jnp.float32


def scratch(dtype, width: int, format: str) -> dict:
    """Shared memory and barriers of one thread block, over rows of a ``format``.

    Barriers: who arrives -> who waits, once for every use of what they guard.
    """
    more = width - VALUE
    buffers = {
        "q": lib.swizzled((1, ROWS, VALUE), dtype),
        "left": lib.swizzled((SLOTS, BLOCK, HALF), dtype),
        "right": lib.swizzled((SLOTS, BLOCK, HALF), dtype),
        "weights": lib.swizzled((SLOTS, ROWS, BLOCK), dtype),  # first: columns behind the value
        "stats": plgpu.SMEM((TOTAL + 4, ROWS), F32),
        "marks": plgpu.SMEM((MARKS, BLOCK), F32),  # which keys of a block there are
        "q_full": lib.barrier(1 + (more > 0)),  # copy engine -> scores
        "p_ready": lib.barrier(count=SLOTS),  # scores -> left, right: P and its factor
        # left, right -> who fills the slot: a part of the keys; P and factor with the last one
        "freed": lib.barrier(2, SLOTS * parts_of(format)),
        "inverse_ready": lib.barrier(count=2),  # scores -> left, right: 1 / sum of a piece
    }
    if more:
        buffers["q_rope"] = lib.swizzled((1, ROWS, more), dtype)
    if format in RECORD_FORMATS:
        buffers["full"] = lib.barrier(count=SLOTS)  # feed -> scores: keys and marks
    else:
        buffers["top_ready"] = lib.barrier(count=2)  # one that scores -> the other: its maximum
        buffers["total_ready"] = lib.barrier(count=2)  # likewise: its sums of a piece
    return buffers


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """``scratch`` of the running thread block."""

    q: Any
    left: Any
    right: Any
    weights: Any
    stats: Any
    marks: Any
    q_full: Any
    p_ready: Any
    freed: Any
    inverse_ready: Any
    q_rope: Any = None  # None: no columns behind the value
    full: Any = None  # of records
    top_ready: Any = None  # of elements
    total_ready: Any = None


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The blocks ``start`` to ``stop`` of a worker, of whose heads ``tile`` has 64."""

    scopes: tuple[Scope, ...]
    line: Line
    heads: int
    simulate: bool
    tile: Any
    queries: list  # [tokens * heads, columns]: of the value, and behind it
    layers: list  # number of the layer in each scope
    first_slot: Any  # of the worker's split pieces
    lists: list  # [tokens, keys] of each scope
    pages: list
    sinks: list  # none, or one of all rows
    results: list  # out, lse, part, part_lse
    start: Any
    stop: Any
    first_token: Any
    last_token: Any
    count: Any  # rows of this tile

    @classmethod
    def of(cls, refs, *, scopes, line: Line, heads: int, simulate: bool, operands: int) -> "Stream":
        """That of a running thread block, from its operands and results."""
        worker, tile = lax.axis_index("worker"), lax.axis_index("tile")
        n, rest = len(scopes), list(refs)
        queries = [rest.pop(0) for _ in range(operands)]
        layers = [
            jnp.clip(rest.pop(0)[0], 0, scope.layers - 1) if scope.layers else I32(0)
            for scope in scopes
        ]
        first_slot = rest.pop(0)[worker] if line.split else I32(-1)
        start = worker * line.share
        stop = jnp.minimum(start + line.share, line.total)
        blocks = I32(line.blocks)
        first_token, last_token = lax.div(start, blocks), lax.div(stop - 1, blocks)
        return cls(
            scopes=scopes, line=line, heads=heads, simulate=simulate, tile=tile, queries=queries,
            layers=layers, first_slot=first_slot, lists=rest[:n], pages=rest[n : 2 * n],
            sinks=rest[2 * n : -4], results=rest[-4:], start=start, stop=stop,
            first_token=first_token, last_token=last_token,
            count=jnp.clip(heads - tile * ROWS, 0, ROWS),
        )  # fmt: skip

    @property
    def parts(self) -> int:
        """In which a slot is freed."""
        return parts_of(self.scopes[0].format)

    @property
    def tiles(self) -> int:
        return self.results[3].shape[1]

    @property
    def live(self) -> int:
        """Rows of a tile that there are, at most."""
        return min(1 << (self.heads - 1).bit_length(), ROWS)

    @property
    def step(self) -> int:
        """What the rows of every tile are a multiple of."""
        return math.gcd(self.heads, ROWS)

    def row_of(self, token):
        """The first row of the tile among the queries and results."""
        return pl.multiple_of(token * self.heads + self.tile * ROWS, 8)

    def piece_of(self, token):
        """Blocks of a token's piece, and whether these are all of the token's."""
        begin = jnp.maximum(self.start - token * self.line.blocks, 0)
        end = jnp.minimum(self.stop - token * self.line.blocks, self.line.blocks)
        return end - begin, (begin == 0) & (end == self.line.blocks)

    def walk(self, piece: Callable, carry: Any = None) -> Any:
        """``piece(token, blocks before, slot, carry)`` for every token; slot -1: in one piece."""

        def turn(token, state):
            g, part, carry = state
            blocks, whole = self.piece_of(token)
            carry = piece(token, g, jnp.where(whole, -1, part), carry)
            return g + blocks, part + jnp.where(whole, 0, 1), carry

        first, last = self.first_token, self.last_token
        return lax.fori_loop(first, last + 1, turn, (I32(0), self.first_slot, carry))[2]

    def parity(self, token):
        """0 or 1: of two buffers that take turns from token to token."""
        return lax.rem(token - self.first_token, I32(2))


def ring(g):
    """Slot of block ``g``."""
    return lax.rem(g, I32(SLOTS))
