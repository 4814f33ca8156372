"""Steps of decodes as an engine would send them, without requests."""

import dataclasses
import time
from typing import Any

import numpy as np

from mla_jax.engine import Engine
from mla_jax.metadata.common import HostBatch
from mla_jax.metadata.packed import Packed
from mla_jax.model.step import StepBatch, empty_batch

__all__ = ["chained", "decodes_of"]


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


def chained(engine: Engine, batch: Packed, calls: int, ahead: int) -> tuple[float, Any]:
    """Microseconds of a step, and what the last one drew.

    Each of the ``calls`` steps has the caches and the tokens of the one before; ``ahead`` more are
    sent before one is read.
    """
    sent, found = [], None
    begun = time.perf_counter()
    for _ in range(calls):
        out, engine._caches = engine._step.run(engine._caches, batch, engine._tokens)
        engine._tokens = out.tokens
        sent.append(out)
        if len(sent) > ahead:
            sent.pop(0).read()
    while sent:
        found = sent.pop(0).read()
    return 1e6 * (time.perf_counter() - begun) / calls, found
