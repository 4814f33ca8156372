"""Tiny decoders of every routing family, and one paged step by hand."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.metadata.buckets import MLABucket
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sampling import SamplingBatch
from mla_jax.model.step import Step, StepBatch, StepOutput
from mla_jax.model.weight_table import expected_shapes
from mla_jax.model.weights import place

MOE = {
    "greedy": MoEConfig(experts=8, topk=3, width=16, shared=2, method="greedy"),
    "group_limited_greedy": MoEConfig(
        experts=8,
        topk=3,
        width=16,
        shared=2,
        method="group_limited_greedy",
        groups=4,
        topk_groups=2,
        scale=16.0,
    ),
    "noaux_tc": MoEConfig(
        experts=8,
        topk=3,
        width=16,
        shared=1,
        method="noaux_tc",
        groups=4,
        topk_groups=2,
        normalise=True,
        scale=2.5,
    ),
}


def config(moe: str | None = "noaux_tc", *, q_rank: int | None = 12, **changes) -> ModelConfig:
    """Three layers (one dense), four heads, widths that share no factor by accident."""
    facts: dict = {
        "family": "deepseek_v3",
        "vocab": 64,
        "hidden": 32,
        "layers": 3,
        "dims": MLADims(heads=4, rank=16, nope=8, rope=4, v=6, q_rank=q_rank),
        "rope": RopeConfig(
            dim=4,
            theta=1e4,
            yarn=YarnConfig(factor=40.0, original=64, mscale=1.0, mscale_all_dim=1.0),
        ),
        "mlp": 48,
        "moe": MOE[moe] if moe else None,
        "sparse_layers": (False, moe is not None, moe is not None),
        "eps": 1e-6,
        "max_positions": 512,
    }
    return ModelConfig(**(facts | changes))


def model(cfg: ModelConfig, seed: int = 0) -> DeepseekV3:
    """A random float32 model; norms and routing bias are random too, so that they matter."""
    rng = np.random.default_rng(seed)
    module = nnx.eval_shape(lambda: DeepseekV3(cfg, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    leaves = {}
    for path, (shape, _) in expected_shapes(cfg).items():
        x = rng.standard_normal(shape).astype(np.float32)
        if path.endswith("scale"):
            x = 1 + 0.1 * x
        elif path.endswith("bias"):
            x = 0.3 * x
        elif not path.startswith("embed"):
            inputs = shape[1:] if path.startswith("stacks.") else shape
            x = x * inputs[-2 if ".experts." in path else 0] ** -0.5
        leaves[path] = jnp.asarray(x)
    place(module, leaves)
    return module


def caches(cfg: ModelConfig, *, num_pages: int, page: int, fill: float = 0.0) -> list:
    """One float32 cache per layer, every element ``fill``."""
    return [
        LatentCache(
            pages=jnp.full((num_pages, page, cfg.dims.row), fill, jnp.float32),
            scale=jnp.ones((), jnp.float32),
            rank=cfg.dims.rank,
            format=LatentCache.alloc(num_pages=1, page=page, rank=1, rope=0, format="fp32").format,
        )
        for _ in range(cfg.layers)
    ]


def batch(
    bucket: MLABucket,
    decodes: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    prefills: Sequence[tuple[Sequence[int], int, Sequence[int]]],
) -> StepBatch:
    """Requests as (new tokens, cached tokens, page ids); decodes first, padding last."""
    tokens, starts, lens = [], [0], []
    table = np.zeros((bucket.requests, bucket.pages), np.int32)
    for i, (new, cached, pages) in enumerate([*decodes, *prefills]):
        tokens += list(new)
        starts.append(len(tokens))
        lens.append(cached + len(new))
        table[i, : len(pages)] = pages
    spare = bucket.requests - len(lens)
    requests = bucket.requests
    return StepBatch(
        token_ids=jnp.array(tokens + [0] * (bucket.tokens - len(tokens)), jnp.int32),
        query_starts=jnp.array(starts + [starts[-1]] * spare, jnp.int32),
        seq_lens=jnp.array(lens + [0] * spare, jnp.int32),
        page_table=jnp.array(table),
        num_decodes=jnp.int32(len(decodes)),
        sampling=SamplingBatch(
            temperature=jnp.zeros((requests,), jnp.float32),
            top_k=jnp.zeros((requests,), jnp.int32),
            top_p=jnp.ones((requests,), jnp.float32),
            seed=jnp.zeros((requests,), jnp.uint32),
            position=jnp.zeros((requests,), jnp.int32),
        ),
    )


def run(
    step: Step, caches: list, bucket: MLABucket, decodes=(), prefills=()
) -> tuple[StepOutput, list]:
    """One step with logits."""
    b = batch(bucket, decodes, prefills)
    return step.run(step.leaves, caches, b, bucket=bucket, want_logits=True)
