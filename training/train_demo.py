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
from mla_jax.demo_task import CHARACTERS, EOS, KINDS, PAD, Question, ask, encode, longest_answer
from mla_jax.model import weights
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.pallas.dense_prefill import ref as dense_prefill
from mla_jax.types import Array, Float, Int
from training.batches import Batch, sample_batch

__all__ = ["CONFIG", "LENGTHS", "Recipe", "Stage", "Trainer", "accuracy"]

CONFIG = ModelConfig(
    family="deepseek_v3",
    vocab=len(CHARACTERS) + 1,
    hidden=128,
    layers=3,
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
    sparse_layers=(False, True, True),
    eps=1e-6,
    max_positions=4096,
    bos=None,
    eos=(EOS,),
)


LENGTHS = (24, 128, 512, 1024, 2048, 3060)
"""Prompt lengths at which a trained model is measured."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Some steps at one shape."""

    length: int
    sequences: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the hardware's rounding."""

    stages: Sequence[Stage] = (
        Stage(length=128, sequences=256, steps=1200),
        Stage(length=512, sequences=64, steps=1200),
        Stage(length=3072, sequences=10, steps=800),
    )
    peak: float = 2e-3  # learning rate after warm-up; cosine to a hundredth of it
    warmup: int = 200
    decay: float = 0.01  # of matrices
    clip: float = 1.0  # global norm of a gradient
    balance: float = 0.02  # largest change of a router's choice bias in one chunk
    chunk: int = 20  # steps between host visits
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
        self.config, self.recipe = config, recipe
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
        share = jnp.stack([jnp.mean(right, where=kind == k, dtype=jnp.float32) for k in (1, 2, 3)])
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
            excess = jnp.clip(load / load.mean() - 1, -1, 1)
            bias[...] = bias[...] - self.recipe.balance * excess.astype(jnp.float32)

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
                few = max(4096 // stage.length, 1)
                batch = sample_batch(probe, sequences=few, length=stage.length)
                loads = self.loads(self.params, batch.tokens)
                self.balance(loads)
                done += steps
                yield {
                    "step": done,
                    "length": stage.length,
                    "loss": round(float(loss.mean()), 5),
                    "right": dict(zip(KINDS, np.asarray(share.mean(0)).tolist(), strict=True)),
                    "load": [round(float(x), 3) for x in (loads.min(), loads.max())],
                    "ms": round(1e3 * (time.perf_counter() - began) / steps, 2),
                }

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and bfloat16 ``model.safetensors`` (routers in float32)."""
        leaves = {}
        for path, leaf in nnx.to_flat_state(nnx.state(self.model(), nnx.Param)):
            router = "router" in path
            leaves[".".join(map(str, path))] = leaf[...] if router else leaf[...].astype("bfloat16")
        weights.save(folder, self.config, leaves)


def accuracy(
    model: DeepseekV3, *, lengths: Sequence[int], questions: int, seed: int, group: int = 32
) -> dict[int, dict[str, float]]:
    """Share of wholly right greedy answers to prompts of each length, by kind.

    One causal pass over prompt and answer: greedy decoding gives the answer exactly if the
    likeliest token is the answer's at every one of its positions.
    """
    width = max(lengths) + max(map(longest_answer, KINDS))

    @nnx.jit
    def likeliest(model: DeepseekV3, ids: Array) -> Array:
        return jnp.argmax(model.logits(model.full(ids)), axis=-1)

    def right(asked: Sequence[Question]) -> int:
        ids = np.full((group, width), PAD, np.int32)
        for row, q in zip(ids, asked, strict=False):
            row[: len(q.prompt + q.answer)] = encode(q.prompt + q.answer)
        best = np.asarray(likeliest(model, ids))
        first = [len(q.prompt) - 1 for q in asked]
        spans = [slice(at, at + len(q.answer)) for at, q in zip(first, asked, strict=True)]
        return sum(
            best[i, span].tolist() == encode(q.answer)
            for i, (span, q) in enumerate(zip(spans, asked, strict=True))
        )

    rng, shares = random.Random(seed), {}
    for tokens in lengths:
        shares[tokens] = {}
        for kind in KINDS:
            asked = [ask(rng, kind, tokens=tokens) for _ in range(questions)]
            groups = [asked[i : i + group] for i in range(0, questions, group)]
            shares[tokens][kind] = sum(map(right, groups)) / questions
    return shares


def main() -> None:
    """Train, save the model folder, measure it and write ``training.json`` beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=512, help="per length and kind")
    args = parser.parse_args()
    dense_prefill.TILE = 4096  # one tile: nothing to skip, but a GPU stays busy
    recipe = Recipe(seed=args.seed)
    trainer, log, began = Trainer(CONFIG, recipe), [], time.perf_counter()
    device = jax.devices()[0]
    for record in trainer.run():
        log.append(record)
        if record["step"] % (10 * recipe.chunk) == 0 or len(log) < 3:
            print(f"{time.perf_counter() - began:6.1f} s  {json.dumps(record)}", flush=True)
            trainer.save(args.out)  # an interrupted run leaves a model
    seconds = time.perf_counter() - began
    trainer.save(args.out)
    shares = accuracy(
        trainer.model(), lengths=LENGTHS, questions=args.questions, seed=10_000 + args.seed
    )
    print(json.dumps(shares, indent=1), flush=True)
    report = {
        "device": f"{device.device_kind}, jax {jax.__version__}",
        "seconds": round(seconds, 1),
        "parameters": sum(x.size for x in jax.tree.leaves(trainer.params)),
        "recipe": asdict(recipe),
        "questions": args.questions,
        "accuracy": shares,
        "log": log,
    }
    (args.out / "training.json").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
