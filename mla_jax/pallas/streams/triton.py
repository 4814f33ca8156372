"""What a sub-block reads of its streams in Triton: two launches.

    logits    W vec(S) in pieces, float32 (the router's program)    [pieces, tokens, out]
    mix       norm, sigmoids, Sinkhorn's rounds, weighted sum of the streams; a program a token

By XLA they are a float32 product by cuBLAS, for which the streams are widened in memory, and two
small kernels for each of Sinkhorn's rounds. A step of few tokens is bound by launches and by the 20
rounds, which follow each other; one of many by reading the streams, twice from memory.
"""

import jax
import jax.numpy as jnp

from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import Mixed, StreamRows
from mla_jax.pallas.router import triton as router
from mla_jax.pallas.streams import kernels_triton as kernels
from mla_jax.types import Array, Float, power_of_two

__all__ = ["mix_streams"]


def mix_streams(
    streams: StreamRows, proj: Float[Array, "streams hidden out"], scale: Float[Array, "3"],
    bias: Float[Array, "out"], *, rounds: int, eps: float, norm_eps: float,
) -> Mixed:  # fmt: skip
    """``ref.mix_streams``."""
    tokens, n, hidden = streams.shape
    spec = jax.ShapeDtypeStruct
    out = (
        spec((tokens, hidden), streams.dtype),
        *(spec((tokens, *shape), jnp.float32) for shape in ((n,), (n, n))),
    )
    if not tokens:
        x, post, matrix = (jnp.zeros(o.shape, o.dtype) for o in out)
        return x, post, matrix
    rows = streams.reshape(tokens, n * hidden)
    kernel = proj.reshape(n * hidden, -1)
    pieces = router.product_pieces(rows, kernel, most=router.NARROW_PIECES)
    return triton_lib.call(
        kernels.mix,
        streams, pieces, scale, bias, tokens,
        out=out,
        grid=tokens,
        warps=8,
        stages=1,
        SIZES=(n, hidden, proj.shape[-1]),
        PIECES=(pieces.shape[0], power_of_two(pieces.shape[0])),
        COLUMNS=power_of_two(hidden),
        ROUNDS=rounds,
        EPS=(float(eps), float(norm_eps)),
    )  # fmt: skip
