"""Random and named batches for the metadata tests: host arrays, decodes first."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from mla_jax.metadata.buckets import CommonBucket
from mla_jax.metadata.common import CommonMetadata, GroupSpec, HostBatch, build_common
from mla_jax.types import cdiv

build = jax.jit(build_common, static_argnames=("bucket", "groups", "shard"))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Real requests of one step and their page table; pages are owned by one request each."""

    query_lens: np.ndarray
    seq_lens: np.ndarray
    table: np.ndarray
    page: int

    @property
    def host(self) -> HostBatch:
        return HostBatch.of(self.query_lens, self.seq_lens)

    @property
    def bucket(self) -> CommonBucket:
        """Exactly this batch."""
        return CommonBucket(
            requests=len(self.query_lens),
            tokens=int(self.query_lens.sum()),
            pages=(self.table.shape[1],),
        )

    def common(self, bucket: CommonBucket | None = None) -> CommonMetadata:
        """The device metadata, in a bucket that holds the batch."""
        bucket = bucket or self.bucket
        starts, lens, requests = self.host.padded_arrays(bucket)
        (width,) = bucket.pages
        grow = ((0, bucket.requests - len(self.table)), (0, width - self.table.shape[1]))
        return build(
            jnp.asarray(starts),
            jnp.asarray(lens),
            {"latent": jnp.asarray(np.pad(self.table, grow))},
            jnp.asarray(requests),
            bucket=bucket,
            groups=(self.group,),
        )

    @property
    def group(self) -> GroupSpec:
        return GroupSpec("latent", self.page)


def make(query_lens, seq_lens, *, page: int, table=None, seed: int = 0) -> Batch:
    """Pages 1, 2, … shuffled over the requests; page 0 belongs to nobody."""
    q, lens = np.asarray(query_lens, np.int32), np.asarray(seq_lens, np.int32)
    if table is None:
        need = [cdiv(int(n), page) for n in lens]
        pages = np.random.default_rng(seed).permutation(sum(need)).astype(np.int32) + 1
        table = np.zeros((len(q), max(need, default=1)), np.int32)
        for row, n, end in zip(table, need, np.cumsum(need), strict=True):
            row[:n] = pages[end - n : end]
    return Batch(query_lens=q, seq_lens=lens, table=np.asarray(table, np.int32), page=page)


SMALL = CommonBucket(requests=8, tokens=56, pages=(40,))
LARGE = CommonBucket(requests=11, tokens=64, pages=(48,))
"""Two buckets that hold every batch of ``batches()``, so that its tests compile little."""

RX = make([1, 1, 3, 2], [5, 9, 5, 6], page=4, table=[[7, 3, 0], [5, 9, 2], [8, 4, 0], [6, 1, 0]])
"""Two decodes and two prompts with cached context."""


@st.composite
def batches(draw, *, max_requests: int = 6, max_query: int = 9, max_context: int = 30) -> Batch:
    """Decodes of one token, then prompts of up to ``max_query``; contexts may be 0."""
    decodes = draw(st.integers(0, max_requests))
    longer = draw(st.lists(st.integers(2, max_query), max_size=max_requests - decodes))
    query = [1] * decodes + longer
    context = [draw(st.integers(0, max_context)) for _ in query]
    lens = [q + c for q, c in zip(query, context, strict=True)]
    page = draw(st.sampled_from([1, 3, 4]))
    return make(query, lens, page=page, seed=draw(st.integers(0, 99)))
