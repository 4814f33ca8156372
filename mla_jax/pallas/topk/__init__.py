"""Which positions each query looks at: the best of the indexer's scores."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.topk import mosaic, triton, xla

BACKENDS = (
    Backend(
        op="select_topk_decode",
        name="mosaic",
        run=mosaic.select_decode,
        requirement=mosaic.DECODE,
    ),
    Backend(
        op="select_topk_prefill",
        name="mosaic",
        run=mosaic.select_prefill,
        requirement=mosaic.PREFILL,
    ),
    Backend(
        op="select_topk_decode",
        name="triton",
        run=triton.select_decode,
        requirement=triton.DECODE,
    ),
    Backend(
        op="select_topk_prefill",
        name="triton",
        run=triton.select_prefill,
        requirement=triton.PREFILL,
    ),
    Backend(op="select_topk_decode", name="xla", run=xla.select_decode),
    Backend(op="select_topk_prefill", name="xla", run=xla.select_prefill),
)
