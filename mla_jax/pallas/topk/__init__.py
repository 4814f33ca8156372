"""Which positions each query looks at: the best of the indexer's scores."""

from mla_jax.pallas.registry import Backend
from mla_jax.pallas.topk import mosaic, triton, xla

BACKENDS = (
    Backend("select_topk_decode", "mosaic", mosaic.select_decode, mosaic.DECODE),
    Backend("select_topk_prefill", "mosaic", mosaic.select_prefill, mosaic.PREFILL),
    Backend("select_topk_decode", "triton", triton.select_decode, triton.DECODE),
    Backend("select_topk_prefill", "triton", triton.select_prefill, triton.PREFILL),
    Backend("select_topk_decode", "xla", xla.select_decode),
    Backend("select_topk_prefill", "xla", xla.select_prefill),
)
