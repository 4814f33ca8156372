"""Train the embedded demo model from nothing: ``python -m training.train_demo OUT_DIR``.

Cross-entropy on answer tokens only, through ``DeepseekV3.full`` (expanded attention, float32
arithmetic), with AdamW and a curriculum over sequence lengths. Forward passes see weights
rounded to bfloat16, gradients update float32 masters, so that saving in bfloat16 loses nothing.
The routers' choice bias follows the load, without an auxiliary loss (arXiv:2408.15664).
"""

import argparse
import json
import math
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from mla_jax.demo_task import CHARACTERS, EOS, KINDS, PAD
from mla_jax.model import weights
from mla_jax.model.deepseek_v3 import DeepseekV3
from mla_jax.model.sharding import named_leaves
from mla_jax.model.stack import periods_of, places_of
from mla_jax.pallas.dense_prefill import xla as dense_prefill
from mla_jax.types import Array, Float, Int
from training.accuracy import LENGTHS, accuracy
from training.batches import Batch, sample_batch

__all__ = ["CONFIG", "Recipe", "Stage", "Trainer", "tokenizer"]

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
    """At most ``steps`` steps at one shape; fewer once a chunk's loss is below ``enough``."""

    length: int
    sequences: int
    steps: int
    enough: float = 0.0

    @classmethod
    def of(cls, text: str) -> "Stage":
        """``LENGTHxSEQUENCESxSTEPS``, as the command line writes it."""
        length, sequences, steps = map(int, text.split("x"))
        return cls(length=length, sequences=sequences, steps=steps)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides the hardware's rounding."""

    stages: Sequence[Stage] = (
        Stage(length=128, sequences=256, steps=4000, enough=0.01),
        Stage(length=512, sequences=64, steps=2000, enough=0.003),
        Stage(length=3072, sequences=10, steps=500),
    )
    peak: float = 2e-3  # learning rate after warm-up; in the last stage it falls, by a cosine
    warmup: int = 200
    decay: float = 0.01  # of matrices
    clip: float = 1.0  # global norm of a gradient
    balance: float = 0.02  # largest change of a router's choice bias in one chunk
    chunk: int = 20  # steps between host visits
    seed: int = 0

    def rate(self, step: int, *, first: int, stage: Stage) -> float:
        """Learning rate of a step; ``first`` is the first one of its stage."""
        warm = min((step + 1) / max(self.warmup, 1), 1.0)
        if stage is not self.stages[-1]:
            return self.peak * warm
        done = (step - first) / stage.steps
        return self.peak * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def tokenizer() -> Tokenizer:
    """``demo_task.encode`` and ``decode`` in the form that ``mla-jax generate --prompt`` reads."""
    vocab = {"<pad>": PAD} | {c: i + 1 for i, c in enumerate(CHARACTERS)}
    made = Tokenizer(models.WordLevel(vocab))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return made


def rounded(params: nnx.State) -> nnx.State:
    """bfloat16 values in float32 arrays; the gradient passes as if nothing was rounded."""

    def through(w: Array) -> Array:
        return w + jax.lax.stop_gradient(w.astype(jnp.bfloat16).astype(w.dtype) - w)

    return jax.tree.map(through, params)


def _is_matrix(path: tuple, weight: Array) -> bool:
    """What weight decay is for: neither norms nor biases, in a stack of layers or not."""
    return weight.ndim > (2 if "stacks" in jax.tree_util.keystr(path) else 1)


class Trainer:
    """A model split into structure, float32 masters and the rest, with its optimiser."""

    def __init__(self, config: ModelConfig, recipe: Recipe):
        model = DeepseekV3(config, dtype=jnp.float32, rngs=nnx.Rngs(recipe.seed))
        self.graph, self.params, self.rest = nnx.split(model, nnx.Param, ...)
        self.config, self.recipe = config, recipe
        matrices = jax.tree.map_with_path(_is_matrix, self.params)
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(recipe.clip),
            optax.scale_by_adam(b2=0.98),
            optax.add_decayed_weights(recipe.decay, mask=matrices),
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

    @partial(jax.jit, static_argnums=(0, 5), donate_argnums=(1, 2))
    def advance(
        self,
        params: nnx.State,
        moments: optax.OptState,
        key: Array,
        rates: Float[Array, "steps"],
        stage: Stage,
    ) -> tuple[nnx.State, optax.OptState, tuple[Array, Array]]:
        """An optimiser step for every rate, on fresh batches; losses and shares of every step."""

        def step(carry: tuple, now: tuple[Array, Array]) -> tuple[tuple, tuple[Array, Array]]:
            (params, moments), (key, rate) = carry, now
            batch = sample_batch(key, sequences=stage.sequences, length=stage.length + 1)
            grad = jax.value_and_grad(self.loss, has_aux=True)
            (loss, share), slope = grad(params, batch)
            change, moments = self.optimiser.update(slope, moments, params)
            change = jax.tree.map(lambda x: -rate * x, change)
            return (optax.apply_updates(params, change), moments), (loss, share)

        keys = jax.random.split(key, rates.shape[0])
        carry, log = jax.lax.scan(step, (params, moments), (keys, rates))
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
        sparse = self.config.sparse_layers
        places = places_of(periods_of(sparse))
        routed = [place for place, routes in zip(places, sparse, strict=True) if routes]
        for place, load in zip(routed, loads, strict=True):
            block = self.params["stacks"][place.stack]["blocks"][place.block]
            bias = block["moe"]["router"]["choice_bias"]
            excess = jnp.clip(load / load.mean() - 1, -1, 1).astype(jnp.float32)
            bias[...] = bias[...].at[place.index].add(-self.recipe.balance * excess)

    def run(self) -> Iterator[dict]:
        """Train through all stages; a record after every chunk."""
        recipe, done = self.recipe, 0
        key = jax.random.key(recipe.seed + 1)
        for stage in recipe.stages:
            first = done
            while done < first + stage.steps:
                began = time.perf_counter()
                end = min(done + recipe.chunk, first + stage.steps)
                rates = [recipe.rate(i, first=first, stage=stage) for i in range(done, end)]
                key, now, probe = jax.random.split(key, 3)
                self.params, self.moments, (loss, share) = self.advance(
                    self.params, self.moments, now, jnp.asarray(rates, jnp.float32), stage
                )
                few = max(4096 // stage.length, 1)
                batch = sample_batch(probe, sequences=few, length=stage.length)
                loads = self.loads(self.params, batch.tokens)
                self.balance(loads)
                record = {
                    "step": end,
                    "length": stage.length,
                    "loss": round(float(loss.mean()), 5),
                    "right": dict(zip(KINDS, np.asarray(share.mean(0)).tolist(), strict=True)),
                    "load": [round(float(x), 3) for x in (loads.min(), loads.max())],
                    "ms": round(1e3 * (time.perf_counter() - began) / (end - done), 2),
                }
                done = end
                yield record
                if record["loss"] < stage.enough:
                    break

    def resume(self, folder: Path) -> None:
        """Take the weights of a saved model; moments and schedule start anew."""
        model = self.model()
        weights.place(model, weights.load(folder, self.config, dtype=np.float32))
        self.params = nnx.state(model, nnx.Param)

    def save(self, folder: Path) -> None:
        """Write config.json, bfloat16 model.safetensors (routers float32) and tokenizer.json."""
        leaves = named_leaves(nnx.state(self.model(), nnx.Param))
        leaves = {
            path: x if "router" in path else x.astype("bfloat16") for path, x in leaves.items()
        }
        weights.save(folder, self.config, leaves)
        tokenizer().save(str(folder / "tokenizer.json"))


def main() -> None:
    """Train, save the model folder, measure it and write ``training.json`` beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a folder that this script has saved")
    parser.add_argument("--stages", type=Stage.of, nargs="+", metavar="LENGTHxSEQUENCESxSTEPS")
    parser.add_argument("--peak", type=float, default=Recipe.peak)
    parser.add_argument("--warmup", type=int, default=Recipe.warmup)
    parser.add_argument("--questions", type=int, default=512, help="per length and kind")
    args = parser.parse_args()
    dense_prefill.TILE = 4096  # one tile: nothing to skip, but a GPU stays busy
    recipe = Recipe(
        stages=args.stages or Recipe.stages, peak=args.peak, warmup=args.warmup, seed=args.seed
    )
    trainer, log, began = Trainer(CONFIG, recipe), [], time.perf_counter()
    if args.resume:
        trainer.resume(args.resume)
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
        "resumed": args.resume is not None,
        "recipe": asdict(recipe),
        "questions": args.questions,
        "accuracy": shares,
        "log": log,
    }
    (args.out / "training.json").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
