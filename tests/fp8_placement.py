"""Block-scaled e4m3 weights on eight devices against one, in a process of its own: JSON."""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.commands import fit
from mla_jax.config import MLADims, ModelConfig, MoEConfig, RopeConfig
from mla_jax.engine import Engine
from mla_jax.model.sampling import SamplingParams
from tests.model import fp8
from tests.placement import shares

WISH = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[1, 5, 9, 30], [2], list(range(3, 40))]


def wide() -> ModelConfig:
    """Eight times 128 of everything that is divided."""
    return fp8.config(
        hidden=128,
        mlp=1024,
        dims=MLADims(heads=8, rank=128, nope=96, rope=32, v=128, q_rank=128),
        rope=RopeConfig(dim=32, theta=10000.0),
        moe=MoEConfig(experts=8, topk=3, width=128, shared=8, method="noaux_tc", normalise=True),
    )


def main() -> dict[str, object]:
    """Tokens, logits and shares: of a model that is divided whole, and of a narrow one."""
    found: dict[str, object] = {"devices": len(jax.devices())}
    for name, cfg in (("wide", wide()), ("narrow", fp8.config())):
        with tempfile.TemporaryDirectory() as root:
            fp8.write(Path(root), cfg)

            def serve(devices: object, root: str = root) -> tuple[Engine, list]:
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
                )
                return engine, engine.generate(PROMPTS, WISH)

            _, want = serve(jax.devices()[0])
            many, got = serve(jax.devices())
        settings = fit.Settings(config=cfg, cards=8, dtype="float32", fp8=True, cache_format="fp32")
        predicted = fit.fit(settings, memory=2**34)
        state = jax.tree.unflatten(many._step._tree, many._step.leaves)
        leaves = {".".join(map(str, p)): v.get_value() for p, v in nnx.to_flat_state(state)}
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
