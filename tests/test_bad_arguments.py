"""Every argument of every operation, replaced by something wrong, is refused in our own words."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mla_jax
from mla_jax import (
    AttnState,
    BlockScaled,
    DecodeMetadata,
    LatentCache,
    MLAError,
    MoEConfig,
    PrefillMetadata,
    RecordCache,
    StatePool,
)
from mla_jax.dispatch import REGISTRY
from mla_jax.metadata.deepseek_v4 import PoolMetadata


def f32(*shape):
    return jnp.ones(shape, jnp.float32)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


def cache(rank, rope, page=4):
    return LatentCache.alloc(num_pages=3, page=page, rank=rank, rope=rope, format="fp32")


LATENT, ROW = cache(16, 4), cache(20, 0)
META = DecodeMetadata(max_query_len=1, page_table=i32(2, 2), seq_lens=i32(2), query_starts=i32(3))
RAGGED = PrefillMetadata(query_starts=i32(2), key_starts=i32(2))
STATE = AttnState(out=f32(2, 3, 4), lse=f32(2, 3))
ANGLES = f32(2, 2), f32(2, 2)
Q = f32(2, 3, 16), f32(2, 3, 4)
POOL = StatePool(
    cache=cache(8, 0), values=f32(2, 1, 8), gates=f32(2, 1, 8), bias=f32(4, 1, 8), gain=f32(8),
    slots=i32(2),
)  # fmt: skip
GROUPS = PoolMetadata(
    overlap=False, first=i32(1), ends=i32(1), tokens=i32(1, 4), kept=i32(1, 4), keep=i32(2)
)
WEIGHT = BlockScaled(values=jnp.zeros((128, 128), jnp.float8_e4m3fn), scale=f32(1, 1))
EXPERTS = f32(3, 4, 5), f32(3, 4, 5), f32(3, 5, 4), f32(2, 2), i32(2, 2)
CODES = RecordCache.alloc(num_pages=2, page=4, format="index_key")
MOE = MoEConfig(experts=4, topk=2, width=8, shared=0, method="greedy")
RMS = {"eps": 1e-6}
SPARSE = {"scale": 0.1, "lengths": i32(2), "sinks": f32(3), "value": 16}

CALLS = {
    "write_latent": ((LATENT, f32(2, 16), f32(2, 4), i32(2)), {}),
    "append_latent": (
        (LATENT, f32(2, 3, 12), f32(2, 20), f32(16), ANGLES, i32(2)),
        {**RMS, "interleaved": True, "up_k": f32(3, 8, 16)},
    ),
    "append_window": ((ROW, f32(2, 3, 20), f32(2, 20), f32(20), ANGLES, i32(2)), RMS),
    "gather_latent": ((LATENT, i32(2, 2), i32(2), i32(3)), {"rows": 3, "dtype": "float32"}),
    "copy_blocks": ((LATENT, i32(1, 2)), {}),
    "swap_blocks": ((LATENT, LATENT, i32(1, 2)), {}),
    "mla_decode": ((*Q, LATENT, META), {"scale": 0.1, "out_dtype": None}),
    "mla_prefill": (
        (f32(2, 3, 12), f32(3, 3, 14), f32(3, 4), RAGGED),
        {"scale": 0.1, "causal": True, "out_dtype": None},
    ),
    "merge_attn_states": ((STATE, STATE), {"out_dtype": None}),
    "apply_sinks": ((STATE, f32(3)), {}),
    "route_tokens": ((f32(2, 4), f32(4, 4), None, jnp.ones(2, bool)), {"moe": MOE}),
    "matmul_float32": ((f32(2, 4), f32(4, 3)), {}),
    "matmul_fp8": ((f32(2, 128), WEIGHT), {}),
    "mix_streams": (
        (f32(2, 2, 4), f32(2, 4, 8), f32(3), f32(8)),
        {"rounds": 3, "eps": 1e-6, "norm_eps": 1e-6},
    ),
    "routed_experts": ((f32(2, 4), *EXPERTS), {"limit": None}),
    "indexer_logits": ((f32(2, 3, 4), f32(2, 3), f32(5, 4)), {}),
    "mla_sparse_decode": ((*Q, LATENT, i32(2, 3)), SPARSE),
    "mla_sparse_prefill": ((*Q, f32(5, 20), i32(2, 3)), SPARSE),
    "gather_rows": ((LATENT, i32(3)), {"dtype": "float32"}),
    "gather_codes": ((CODES, i32(3)), {}),
    "write_rows": ((LATENT, (f32(2, 16), f32(2, 4)), i32(2)), {}),
    "pool_states": ((cache(16, 0, page=8), (POOL,), GROUPS, i32(2), (f32(1, 2), f32(1, 2))), RMS),
}
PLANS = {
    "plan_decode": ((META, LATENT), {"tokens": 2, "heads": 3, "dtype": "float32"}),
    "plan_prefill": (
        (RAGGED,),
        {"tokens": 2, "keys": 3, "heads": 3, "nope": 8, "rope": 4, "v": 6, "dtype": "float32"},
    ),
}
WRONG = (
    None, "x", -1, 0.5, float("nan"), 10**400, [1, 2], (), {}, True,
    np.zeros((0,)), np.zeros((1, 1, 1, 1, 1)), np.array(["a"]),
)  # fmt: skip
FINE = {  # of these: what is right
    "out_dtype": {"None"},
    "lengths": {"None"},
    "sinks": {"None"},
    "up_k": {"None"},
    "value": {"None"},
    "limit": {"None", "0.5"},
    "scale": {"-1", "0.5"},
    "eps": {"0.5"},
    "norm_eps": {"0.5"},
    "interleaved": {"True"},
    "causal": {"True"},
    "choice_bias": {"None"},
    "layer": {"None"},
    "backend": {"None"},
    "tuning": {"None"},
    "plan": {"None"},
}
ARRAYS = {("apply_sinks", "sinks"), ("mix_streams", "scale")}
"""Names that mean an array here, and in other operations a number or None."""


def outcome(name, args, kwargs):
    """``fine``, ``ours``, or the name of another exception."""
    op = getattr(mla_jax, name)
    try:
        if name in PLANS:
            op(*args, **kwargs)
        else:
            jax.eval_shape(lambda: op(*args, **kwargs))
    except MLAError as error:
        return "ours" if 20 < len(str(error)) < 1500 else f"says {error}"
    except Exception as error:  # what this test is about
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("name", [*CALLS, *PLANS])
def test_wrong_arguments_are_refused_by_name(name, our_errors):
    args, kwargs = (CALLS | PLANS)[name]
    assert outcome(name, args, kwargs) == "fine"
    names = inspect.signature(getattr(mla_jax, name)).parameters
    positions = {n: i for i, n in enumerate(list(names)[: len(args)])}
    if name == "merge_attn_states":
        positions = {"state": 0, "other": 1}
    optional = {n: None for n in ("layer", "backend", "tuning", "plan") if n in names}
    found = {}
    for argument in (*positions, *kwargs, *optional):
        for wrong in WRONG:
            if argument in positions:
                i = positions[argument]
                call = (*args[:i], wrong, *args[i + 1 :]), kwargs
            else:
                call = args, {**kwargs, argument: wrong}
            said = outcome(name, *call)
            right = () if (name, argument) in ARRAYS else FINE.get(argument, ())
            expected = "fine" if repr(wrong) in right else "ours"
            if said != expected:
                found[f"{argument}={repr(wrong)[:20]}"] = said
    assert not found


def test_every_operation_is_tried():
    """But sums over devices, which need a mesh (``test_all_reduce``)."""
    public = {b.op for b in REGISTRY.backends} & set(mla_jax.__all__)
    assert public - set(CALLS) == {"routed_experts_fp8", "all_reduce"}


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks"])
def test_pairs_of_pages_have_two_columns(op, our_errors):
    caches = [LATENT] * (1 + (op == "swap_blocks"))
    with pytest.raises(MLAError, match=r"pairs: given shape \(1, 3\); allowed: \[pairs, 2\]"):
        getattr(mla_jax, op)(*caches, i32(1, 3))


def test_a_cache_of_numpy_arrays_is_refused(our_errors):
    """As ``jax.device_get`` gives it: it cannot be written in place."""
    cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), LATENT)
    hint = "pages: given a numpy array.*jax.device_put"
    with pytest.raises(MLAError, match=hint):
        mla_jax.write_latent(cache, f32(2, 16), f32(2, 4), i32(2))
    with pytest.raises(MLAError, match=hint):
        mla_jax.gather_rows(cache, i32(2), dtype="float32")


def test_a_backend_of_no_operation_is_refused_for_every_cache(our_errors):
    with pytest.raises(MLAError, match=r"write_latent\[x\]: no backend of this name"):
        mla_jax.write_rows(LATENT, (f32(2, 16), f32(2, 4)), i32(2), backend="x")
    with pytest.raises(MLAError, match=r"write_latent\[triton\]: no backend of this name"):
        mla_jax.write_rows(LATENT, (f32(2, 16), f32(2, 4)), i32(2), backend="triton")
    assert "xla: accepted" in mla_jax.explain("write_rows", LATENT, (f32(2, 16), f32(2, 4)), i32(2))
