"""Scores of queries against index keys (the lightning indexer of V3.2 and V4)."""

from mla_jax.pallas.indexer import ref
from mla_jax.pallas.registry import Backend

BACKENDS = (Backend("indexer_logits", "xla", ref.indexer_logits),)
