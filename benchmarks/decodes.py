"""A step of decodes as an engine would send it, without requests."""

import dataclasses

import numpy as np

from mla_jax.engine import Engine
from mla_jax.metadata.common import HostBatch
from mla_jax.model.step import StepBatch, empty_batch

__all__ = ["decodes_of"]


def decodes_of(engine: Engine, requests: int, keys: int) -> StepBatch:
    """One random token of each request, the last of ``keys``, with pages of its own."""
    host = HostBatch.of(np.ones(requests, np.int32), np.full(requests, keys, np.int32))
    decision = engine.builder.decide(host)
    batch = empty_batch(decision, [group.name for group in engine.groups])
    starts, lens, count = host.padded_arrays(decision.common_bucket)
    for group in engine.scheduler.groups:
        first = group.unseen(keys - 1)
        width = group.pages_of(keys) - first
        own = np.reshape(group.pool.alloc(requests * width), (requests, width))
        batch.page_tables[group.name][:requests, first : first + width] = own
    shape = batch.token_ids.shape
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, shape, np.int32)
    return dataclasses.replace(
        batch,
        token_ids=ids,
        query_starts=starts,
        seq_lens=lens,
        num_requests=np.asarray(count, np.int32),
        sampling=dataclasses.replace(batch.sampling, position=lens),
    )
