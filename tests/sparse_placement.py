"""Tiny V3.2, GLM-5 and V4 on eight devices against one, in a process of its own: JSON."""

import json

import jax
import numpy as np

from mla_jax.model.sampling import SamplingParams
from tests.model import sparse, v4


def main() -> dict[str, object]:
    """Tokens equal, and the parts of its leaves that a device holds."""
    rng = np.random.default_rng(0)
    asked = [rng.integers(3, 64, n).tolist() for n in (1, 7, 9, 40, 20)]
    wish = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found: dict[str, object] = {"devices": len(jax.devices())}
    for kind in ("deepseek_v32", "glm_moe_dsa", "deepseek_v4"):
        maker = v4 if kind == "deepseek_v4" else sparse
        cfg = v4.config() if maker is v4 else sparse.config(kind)
        module = maker.model(cfg)
        one, many = (
            maker.engine(module, cfg, devices=devices)
            for devices in (jax.devices()[0], jax.devices())
        )
        tokens = [[c.token_ids for c in e.generate(asked, wish)] for e in (one, many)]
        parts = sorted(
            {leaf.addressable_shards[0].data.size / leaf.size for leaf in many._step.leaves}
        )
        found[kind] = [tokens[0] == tokens[1], parts]
    return found


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    print(json.dumps(main()))
