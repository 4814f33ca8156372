"""Tiny decoders of every routing family, and one paged step by hand."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.cache import LatentCache
from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.metadata.buckets import Ladder, MLABucket, MLALadder
from mla_jax.metadata.builder import MLADecision, MLAMetadataBuilder
from mla_jax.metadata.common import GroupSpec
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sharding import named_leaves
from mla_jax.model.step import Step, StepBatch, StepOutput, empty_batch
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


def leaves(model: DeepseekV3) -> dict:
    """Every weight by its path."""
    return named_leaves(nnx.state(model, nnx.Param))


def step(model: DeepseekV3, *, page: int, **settings) -> Step:
    """A step whose programs return logits; its buckets are given by hand."""
    one = Ladder("any", (1,))
    ladder = MLALadder(decodes=one, prefills=one, prefill_tokens=one, pages=one, context_rows=1)
    builder = MLAMetadataBuilder(ladder=ladder, group=GroupSpec(name="latent", page=page))
    return Step(model, builder, want_logits=True, most_requests=16, **settings)


def caches(cfg: ModelConfig, *, num_pages: int, page: int, fill: float = 0.0) -> dict:
    """One float32 stack of all layers, every element ``fill``."""
    facts = {"page": page, "rank": cfg.dims.rank, "rope": cfg.dims.rope, "format": "fp32"}
    cache = LatentCache.alloc(num_pages=num_pages, layers=cfg.layers, **facts)
    return {"latent": dataclasses.replace(cache, pages=jnp.full_like(cache.pages, fill))}


def batch(
    bucket: MLABucket,
    decodes: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    prefills: Sequence[tuple[Sequence[int], int, Sequence[int]]],
) -> StepBatch:
    """Requests as (new tokens, cached tokens, page ids); decodes first, padding last."""
    decision = MLADecision(
        bucket=bucket,
        num_decodes=np.asarray(len(decodes), np.int32),
        num_prefills=np.asarray(len(prefills), np.int32),
    )
    empty = empty_batch(decision, ["latent"])
    tokens, starts, lens = [], [0], []
    for i, (new, cached, pages) in enumerate([*decodes, *prefills]):
        tokens += list(new)
        starts.append(len(tokens))
        lens.append(cached + len(new))
        empty.page_tables["latent"][i, : len(pages)] = pages
    empty.token_ids[: len(tokens)] = tokens
    empty.query_starts[:] = starts + [starts[-1]] * (bucket.requests - len(lens))
    empty.seq_lens[: len(lens)] = lens
    return dataclasses.replace(empty, num_requests=np.asarray(len(lens), np.int32))


def run(
    step: Step, caches: dict, bucket: MLABucket, decodes=(), prefills=()
) -> tuple[StepOutput, dict]:
    """One step with logits."""
    return step.run(caches, batch(bucket, decodes, prefills))
