"""Train the embedded demo model from nothing: ``python -m training.train_demo OUT_DIR``.

Cross-entropy on answer tokens only, through ``DeepseekV3.full`` (expanded attention, float32
arithmetic), with AdamW and a curriculum over sequence lengths. Forward passes see weights
rounded to bfloat16, gradients update float32 masters, so that saving in bfloat16 loses nothing.
The routers' choice bias follows the load, without an auxiliary loss (arXiv:2408.15664).
"""

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.demo_task import CHARACTERS, EOS, KINDS, PAD, ask, encode
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.types import Array, Float, Int
from training.batches import Batch, sample_batch

__all__ = ["CONFIG", "Recipe", "Stage", "Trainer", "accuracy"]

CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab=len(CHARACTERS) + 1,
    hidden=128,
    layers=4,
    dims=MLADims(heads=4, rank=64, nope=32, rope=16, v=32, q_rank=64),
    rope=RopeConfig(
        dim=16,
        theta=10000.0,
        yarn=YarnConfig(factor=4.0, original=1024, mscale=1.0, mscale_all_dim=1.0),
    ),
    mlp=256,
    moe=MoEConfig(
        experts=8,
        topk=2,
        width=64,
        shared=1,
        method="noaux_tc",
        groups=4,
        topk_groups=2,
        normalise=True,
        scale=2.5,
    ),
    sparse_layers=(False, True, True, True),
    eps=1e-6,
    max_positions=4096,
    bos=None,
    eos=(EOS,),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some steps at one shape."""

    length: int
    sequences: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the hardware's rounding."""

    stages: Sequence[Stage]
    peak: float = 2e-3  # learning rate after warm-up; cosine to a hundredth of it
    warmup: int = 200
    decay: float = 0.01  # of matrices
    clip: float = 1.0  # global norm of a gradient
    balance: float = 0.01  # step of the routers' choice bias, once per chunk
    chunk: int = 50  # steps between host visits
    seed: int = 0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)


def rounded(params: nnx.State) -> nnx.State:
    """bfloat16 values in float32 arrays; the gradient passes as if nothing was rounded."""

    def through(w: Array) -> Array:
        return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

    return jax.tree.map(through, params)


class Trainer:
    """A model split into structure, float32 masters and the rest, with its optimiser."""

    def __init__(self, config: ModelConfig, recipe: Recipe):
        model = DeepseekV3(config, dtype=jnp.float32, rngs=nnx.Rngs(recipe.seed))
        self.graph, self.params, self.rest = nnx.split(model, nnx.Param, ...)
        self.recipe = recipe
        rate = optax.warmup_cosine_decay_schedule(
            0.0, recipe.peak, recipe.warmup, recipe.steps, recipe.peak / 100
        )
        matrices = jax.tree.map(lambda w: w.ndim > 1, self.params)
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(recipe.clip),
            optax.adamw(rate, b2=0.98, weight_decay=recipe.decay, mask=matrices),
        )
        self.moments = self.optimiser.init(self.params)

    def model(self) -> DeepseekV3:
        """The model as it will be saved: masters rounded to bfloat16, in float32 arrays."""
        return nnx.merge(self.graph, rounded(self.params), self.rest)

    def loss(self, params: nnx.State, batch: Batch) -> tuple[Float[Array, ""], Array]:
        """Mean cross-entropy of answer tokens, and the share of right ones of each kind."""
        model = nnx.merge(self.graph, rounded(params), self.rest)
        logits = model.logits(model.full(batch.tokens[:, :-1]))
        target, kind = batch.tokens[:, 1:], batch.kind[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        right = jnp.argmax(logits, axis=-1) == target
        share = jnp.stack(
            [jnp.mean(right, where=kind == k, dtype=jnp.float32) for k in (1, 2, 3)]
        )
        return jnp.mean(each, where=kind > 0), share

    @partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=(1, 2))
    def advance(
        self, params: nnx.State, moments: optax.OptState, key: Array, stage: Stage, steps: int
    ) -> tuple[nnx.State, optax.OptState, tuple[Array, Array]]:
        """Some optimiser steps, each on a fresh batch; losses and shares of every step."""

        def step(carry: tuple, key: Array) -> tuple[tuple, tuple[Array, Array]]:
            params, moments = carry
            batch = sample_batch(key, sequences=stage.sequences, length=stage.length + 1)
            grad = jax.value_and_grad(self.loss, has_aux=True)
            (loss, share), slope = grad(params, batch)
            change, moments = self.optimiser.update(slope, moments, params)
            return (optax.apply_updates(params, change), moments), (loss, share)

        carry, log = jax.lax.scan(step, (params, moments), jax.random.split(key, steps))
        return *carry, log

    @partial(jax.jit, static_argnums=0)
    def loads(self, params: nnx.State, tokens: Int[Array, "sequences length"]) -> Array:
        """Share of the routed tokens that each expert of each sparse layer gets."""
        model = nnx.merge(self.graph, rounded(params), self.rest)
        h, loads = model.embed(tokens), []
        for block in model.layers:
            if block.sparse:
                seen = h + jax.vmap(block.attn.full)(block.attn_norm(h))
                _, experts = block.moe.router(block.mlp_norm(seen).reshape(-1, h.shape[-1]))
                count = block.moe.experts.gate[...].shape[0]
                loads.append(jnp.bincount(experts.reshape(-1), length=count) / experts.size)
            h = block.full(h)
        return jnp.stack(loads)

    def balance(self, loads: Float[Array, "layers experts"]) -> None:
        """Move each expert's choice bias against its excess load."""
        blocks = [block for block in self.params["layers"].values() if "moe" in block]
        for block, load in zip(blocks, loads, strict=True):
            bias = block["moe"]["router"]["choice_bias"]
            step = self.recipe.balance * jnp.sign(load.mean() - load)
            bias[...] = bias[...] + step.astype(jnp.float32)

    def run(self) -> Iterator[dict]:
        """Train through all stages; a record after every chunk."""
        key, done = jax.random.key(self.recipe.seed + 1), 0
        for stage in self.recipe.stages:
            for first in range(0, stage.steps, self.recipe.chunk):
                began = time.perf_counter()
                steps = min(self.recipe.chunk, stage.steps - first)
                key, now, probe = jax.random.split(key, 3)
                self.params, self.moments, (loss, share) = self.advance(
                    self.params, self.moments, now, stage, steps
                )
                batch = sample_batch(probe, sequences=max(4096 // stage.length, 1),
                                     length=stage.length)  # fmt: skip
                loads = self.loads(self.params, batch.tokens)
                self.balance(loads)
                done += steps
                yield {
                    "step": done,
                    "length": stage.length,
                    "loss": float(loss[-10:].mean()),
                    "right": dict(zip(KINDS, np.round(share[-10:].mean(0), 4).tolist(), strict=True)),
                    "load": [round(float(x), 3) for x in (loads.min(), loads.max())],
                    "ms": round(1e3 * (time.perf_counter() - began) / steps, 2),
                }


def accuracy(
    model: DeepseekV3, *, tokens: int, questions: int, seed: int, group: int = 64
) -> dict[str, float]:
    """Share of wholly right greedy answers to prompts of ``tokens`` tokens, by kind.

    One causal pass over prompt and answer: greedy decoding gives the answer exactly if the
    likeliest token is the answer's at every one of its positions.
    """

    @nnx.jit
    def likeliest(model: DeepseekV3, ids: Array) -> Array:
        return jnp.argmax(model.logits(model.full(ids)), axis=-1)

    rng, result = random.Random(seed), {}
    for kind in KINDS:
        asked = [ask(rng, kind, tokens=tokens) for _ in range(questions)]
        right = 0
        for at in range(0, questions, group):
            part = asked[at : at + group]
            ids = np.full((group, tokens + 16), PAD, np.int32)
            for row, q in zip(ids, part, strict=False):
                row[: len(q.prompt + q.answer)] = encode(q.prompt + q.answer)
            best = np.asarray(likeliest(model, ids))
            for row, q in zip(best, part, strict=False):
                first = len(q.prompt) - 1
                right += row[first : first + len(q.answer)].tolist() == encode(q.answer)
        result[kind] = right / questions
    return result
