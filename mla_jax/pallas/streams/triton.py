"""What a sub-block reads of its streams in Triton: three launches.

    logits     W vec(S) in pieces, float32 (the router's program)    [pieces, tokens, out]
    collapse   norm, sigmoid, weighted sum of the streams; x's norm  [tokens, hidden]
    mix        sigmoid, Sinkhorn's rounds                            [tokens, n], [tokens, n, n]

By XLA they are a float32 product by cuBLAS, for which the streams are widened in memory, and two
small kernels for each of Sinkhorn's rounds. A step of few tokens is bound by launches and by the 20
rounds, which follow each other: the sub-block need not wait for them, so they run beside it. A step
of many tokens is bound by reading the streams, twice from memory.
"""

import jax
import jax.numpy as jnp

from mla_jax.pallas import triton_lib
from mla_jax.pallas.axes import Mixed, StreamRows
from mla_jax.pallas.router import triton as router
from mla_jax.pallas.streams import kernels_triton as kernels
from mla_jax.types import Array, Float, power_of_two

__all__ = ["mix_streams"]

WIDE = 32768
"""Channels of all streams up to which eight warps have registers for them."""


def mix_streams(
    streams: StreamRows, proj: Float[Array, "streams hidden out"], scale: Float[Array, "3"],
    bias: Float[Array, "out"], gain: Float[Array, "hidden"] | None, *, rounds: int, eps: float,
    norm_eps: float,
) -> Mixed:  # fmt: skip
    """``ref.mix_streams``."""
    tokens, n, hidden = streams.shape
    spec = jax.ShapeDtypeStruct
    shapes = (tokens, n), (tokens, n, n)
    if not tokens:
        post, matrix = (jnp.zeros(shape, jnp.float32) for shape in shapes)
        return jnp.zeros((tokens, hidden), streams.dtype), post, matrix
    rows = streams.reshape(tokens, n * hidden)
    kernel = proj.reshape(n * hidden, -1)
    pieces = router.product_pieces(rows, kernel, most=router.NARROW_PIECES)
    facts = {
        "SIZES": (n, hidden, proj.shape[-1]),
        "PIECES": (pieces.shape[0], power_of_two(pieces.shape[0])),
        "EPS": (float(eps), float(norm_eps)),
    }
    columns = power_of_two(hidden)
    x, norm = triton_lib.call(
        kernels.collapse,
        streams, pieces, scale, bias, streams if gain is None else gain, tokens,
        out=(spec((tokens, hidden), streams.dtype), spec((tokens,), jnp.float32)),
        grid=tokens,
        warps=8 if n * columns <= WIDE else 16,
        stages=1,
        COLUMNS=columns,
        NORMED=gain is not None,
        **facts,
    )  # fmt: skip
    post, matrix = triton_lib.call(
        kernels.mix,
        pieces, norm, scale, bias, tokens,
        out=tuple(spec(shape, jnp.float32) for shape in shapes),
        grid=tokens,
        warps=1,
        stages=1,
        ROUNDS=rounds,
        **facts,
    )  # fmt: skip
    return x, post, matrix
