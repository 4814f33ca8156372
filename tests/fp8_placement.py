"""Block-scaled e4m3 weights on eight devices against one, in a process of its own: JSON."""

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.commands import fit
from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig
from mla_jax.config_v4 import V4Config
from mla_jax.engine import Engine
from mla_jax.model.moe import MoE
from mla_jax.model.sampling import SamplingParams
from mla_jax.model.sharding import named_leaves, sharding_of
from mla_jax.pallas import fp8_matmul
from mla_jax.pallas.axes import AddNorm
from mla_jax.placement import Placement
from tests.model import fp8, v4, v4_published
from tests.placement import shares

WISH = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[1, 5, 9, 30], [2], list(range(3, 40))]
# Short prompts have few activations. So it is rare that one of them lies between two e4m3 codes and
# so near the midpoint that the order of a sum decides its code.
SHORT = [[7 * i % 31 + 1, 11 * i % 37 + 1, i + 1][: 1 + i % 3] for i in range(9)]


def wide() -> ModelConfig:
    """Eight times 128 of everything that is divided."""
    return fp8.config(
        hidden=128,
        mlp=1024,
        dims=MLADims(heads=8, rank=128, nope=96, rope=32, v=128, q_rank=128),
        rope=RopeConfig(dim=32, theta=10000.0),
        moe=MoEConfig(experts=8, topk=3, width=128, shared=8, method="noaux_tc", normalise=True),
    )


def by_width() -> ModelConfig:
    """The same with routed experts of eight times 128: each device has a part of every expert."""
    moe = MoEConfig(experts=6, topk=3, width=1024, shared=1, method="noaux_tc", normalise=True)
    return dataclasses.replace(wide(), moe=moe)


def wide_v4() -> V4Config:
    """The same of V4, but for the indexer's products, which are whole."""
    return v4.config(
        hidden=128,
        heads=8,
        dim=128,
        q_rank=128,
        out_groups=8,
        out_rank=1024,
        moe=MoEConfig(
            experts=8, topk=2, width=128, shared=8, method="sqrtsoftplus", normalise=True, scale=1.5
        ),
    )


def experts(cfg: ModelConfig, *, width8: bool, bias: bool) -> list:
    """Arrays that the devices add up in a layer of float32 experts; how far off its result is.

    ``width8``: whether the devices divide the shared experts; ``bias``: whether these have biases.
    """
    moe = cfg.moe if width8 else dataclasses.replace(cfg.moe, shared=1, width=12)
    cfg = dataclasses.replace(cfg, moe=moe, mlp_bias=bias)
    layer = MoE(cfg, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    keys = iter(jax.random.split(jax.random.key(1), 32))
    state = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape), state)
    x, h = 2 * jax.random.normal(jax.random.key(2), (2, 40, cfg.hidden))
    real = jnp.arange(40) < 37

    def run(state, placement):
        then = AddNorm(residual=h, gain=jnp.ones(cfg.hidden), eps=1e-6)
        return nnx.merge(graph, state).onto(then, x, real, placement=placement)

    want = jax.jit(functools.partial(run, placement=None))(state)
    placement = Placement.of(jax.devices())
    leaves, tree = jax.tree.flatten(state)
    pairs = named_leaves(state).items()
    homes = [sharding_of(path, x.shape, x.dtype, placement) for path, x in pairs]
    placed = jax.tree.unflatten(tree, jax.device_put(leaves, homes))
    program = jax.jit(functools.partial(run, placement=placement)).lower(placed).compile()
    pairs = zip(want, program(placed), strict=True)
    off = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    sums = re.findall(r"= (.*) all-reduce(?:-start)?\(", program.as_text())
    return [sum(shape.count("[") for shape in sums), off]


def _off(got: list, want: list) -> list[float]:
    """Of each prompt: the largest difference of its first token's logits."""
    pairs = zip(got, want, strict=True)
    return [float(np.abs(a.logits[0] - b.logits[0]).max()) for a, b in pairs]


def main() -> dict[str, object]:
    """Tokens, logits and shares: of a model that is divided whole, and of a narrow one."""
    found: dict[str, object] = {"devices": len(jax.devices())}
    found["experts"] = {
        f"{name} {width8} {bias}": experts(cfg, width8=width8, bias=bias)
        for name, cfg, width8 in (
            ("wide", wide(), True),
            ("wide", wide(), False),
            ("by_width", by_width(), True),
        )
        for bias in (True, False)
    }
    sizes = fp8_matmul.MANY, fp8_matmul.MANY_EACH
    kinds = {"wide": wide(), "by_width": by_width(), "narrow": fp8.config(), "v4": wide_v4()}
    for name, cfg in kinds.items():
        with tempfile.TemporaryDirectory() as root:
            write = v4_published.write if name == "v4" else fp8.write
            write(Path(root), cfg)

            def serve(devices: object, root: str = root, **more: bool) -> tuple[Engine, list]:
                engine = Engine.from_pretrained(
                    root,
                    dtype=jnp.dtype("float32"),
                    fp8_weights=True,
                    want_logits=True,
                    devices=devices,
                    num_pages=64,
                    page=8,
                    max_requests=4,
                    prefill_chunk=16,
                    **more,
                )
                return engine, engine.generate(PROMPTS + SHORT, WISH)

            _, want = serve(jax.devices()[0])
            many, got = serve(jax.devices())
            if name in ("wide", "by_width", "v4"):
                fp8_matmul.MANY, fp8_matmul.MANY_EACH = 8, 2
                places = jax.devices()[0], jax.devices()
                one, all_ = (serve(devices, fp8_activations=True)[1] for devices in places)
                found[f"{name} rounded"] = [_off(one, all_), _off(one, want)]
                fp8_matmul.MANY, fp8_matmul.MANY_EACH = sizes
        settings = fit.Settings(config=cfg, cards=8, dtype="float32", fp8=True, cache_format="fp32")
        predicted = fit.fit(settings, memory=2**34)
        state = jax.tree.unflatten(many._step._tree, many._step.leaves)
        leaves = named_leaves(state)
        found[name] = {
            "tokens": [a.token_ids for a in got] == [b.token_ids for b in want],
            "off": max(
                float(np.abs(a.logits - b.logits).max()) for a, b in zip(got, want, strict=True)
            ),
            "shares": {path: shares(leaf) for path, leaf in leaves.items()},
            "bytes": [many.stats().weight_bytes, predicted.weights + predicted.derived],
            "e4m3": [p for p, leaf in leaves.items() if leaf.dtype == jnp.float8_e4m3fn],
        }
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
