"""Operations under a mesh with Explicit axes, which ``jax.make_mesh`` has by default.

Backend ``xla``, no ``jax.shard_map``: heads divided stay divided, whatever else comes divided is
brought together, and the numbers are those of one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mla_jax import ops
from mla_jax.cache import FORMATS, LatentCache
from mla_jax.config import MLADims
from mla_jax.pallas import mosaic_lib
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import AttnState
from tests.cases import decode_case, draw, paged, prefill_case, stacked, starts
from tests.compare import close_states

DEVICES = 2
HEADS, TOKENS, WHOLE = P(None, "heads"), P("heads"), P()
DIMS = MLADims(heads=4, rank=16, nope=8, rope=4, v=6, q_rank=None)
H200 = DeviceInfo(platform="gpu", kind="NVIDIA H200", sm=90, sms=132, shared_memory=232448)
FORMAT = pytest.mark.parametrize("format", ["fp32", "fp8_e4m3"])


@pytest.fixture
def put():
    """``put(tree, spec)``: divided over two devices; the mesh's axes are Explicit."""
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} devices; the backend here has {len(jax.devices())}")
    mesh = jax.make_mesh((DEVICES,), ("heads",), devices=jax.devices()[:DEVICES])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    return lambda tree, spec=WHOLE: jax.device_put(tree, NamedSharding(mesh, spec))


def spec_of(x):
    parts = (*x.sharding.spec, *[None] * x.ndim)[: x.ndim]
    return tuple(parts)


def jitted(op, **more):
    return jax.jit(functools.partial(op, backend="xla", **more))


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("shared", ["apart", "replicated"])
@FORMAT
def test_decode(format, shared, layer, put, rng):
    """The cache and the metadata on one device, or on the mesh."""
    scale = 0.5 if FORMATS[format].quantised else 1.0
    case = decode_case(
        rng, dims=DIMS, seq_lens=[9, 0, 4], query_lens=[2, 1, 1], format=format, dtype="float32",
        cache_scale=scale, pad_tokens=0,
    )  # fmt: skip
    q_latent, q_rope, cache, meta = case.args
    want = jitted(ops.mla_decode, scale=case.scale)(*case.args)
    more = {} if layer is None else {"layer": layer}
    cache = cache if layer is None else stacked(cache, layer)
    if shared == "replicated":
        cache, meta = put(cache), put(meta)
    solve = jitted(ops.mla_decode, scale=case.scale, **more)
    found = solve(*put((q_latent, q_rope), HEADS), cache, meta)
    assert spec_of(found.out) == (None, "heads", None)
    assert spec_of(found.lse) == (None, "heads")
    close_states(found, want, atol=1e-6)
    tokens = put((q_latent, q_rope), TOKENS)
    close_states(solve(*tokens, cache, meta), want, atol=1e-6)


def test_prefill_and_merge(put, rng):
    case = prefill_case(rng, dims=DIMS, query_lens=[5, 0, 3], dtype="float32", pad=2)
    q, kv, k_rope, meta = case.args
    for causal in (True, False):
        solve = jitted(ops.mla_prefill, scale=case.scale, causal=causal)
        want = solve(*case.args)
        divided = put((q, kv), HEADS)
        for rope, m in ((k_rope, meta), (put(k_rope), put(meta)), (put(k_rope, TOKENS), meta)):
            found = solve(*divided, rope, m)
            assert spec_of(found.out) == (None, "heads", None)
            close_states(found, want, atol=1e-6)
        merge = jitted(ops.merge_attn_states)
        merged = merge(found, found)
        assert spec_of(merged.out) == (None, "heads", None)
        close_states(merged, merge(want, want), atol=1e-6)
        sinks = jnp.asarray(draw(rng, DIMS.heads))
        sunk = jitted(ops.apply_sinks)(found, put(sinks, TOKENS))
        close_states(sunk, jitted(ops.apply_sinks)(want, sinks), atol=1e-6)


def test_attention_where_the_mesh_is_set(put, rng):
    """``jax.set_mesh``: loops must begin with what they carry divided as it ends."""
    case = decode_case(
        rng, dims=DIMS, seq_lens=[9, 0, 4], query_lens=[2, 1, 1], format="fp32", dtype="float32",
        pad_tokens=0,
    )  # fmt: skip
    solve = jitted(ops.mla_decode, scale=case.scale)
    want = solve(*case.args)
    new = prefill_case(rng, dims=DIMS, query_lens=[5, 0, 3], dtype="float32", pad=2)
    fill = jitted(ops.mla_prefill, scale=new.scale)
    filled = fill(*new.args)
    queries = put(case.args[:2], HEADS)
    with jax.set_mesh(queries[0].sharding.mesh):
        close_states(solve(*queries, *put(case.args[2:])), want, atol=1e-6)
        close_states(fill(*put(new.args[:2], HEADS), *put(new.args[2:])), filled, atol=1e-6)


@pytest.mark.parametrize("spec", [P(), TOKENS, P(None, "heads")])
@pytest.mark.parametrize("layer", [None, 1])
@FORMAT
def test_write_and_gather(format, layer, spec, put, rng):
    """Rows that come divided, by tokens or by columns, are stored whole on every device."""
    cache, table, _ = paged(rng, [9, 14], dims=DIMS, page=4, format=format)
    more = {} if layer is None else {"layer": layer}
    cache = cache if layer is None else stacked(cache, layer)
    x = jnp.asarray(draw(rng, 6, DIMS.row, dtype="float32"))
    data = x[:, : DIMS.rank], x[:, DIMS.rank :]
    slots = jnp.asarray([3, -1, 7, 0, 25, 1], jnp.int32)
    write = jitted(ops.write_latent, **more)
    want = write(cache, *data, slots)
    slots_spec = TOKENS if spec == TOKENS else P()
    found = write(put(cache), *put(data, spec), put(slots, slots_spec))
    assert not any(spec_of(found.pages))
    np.testing.assert_array_equal(
        np.asarray(found.pages).view(np.uint8), np.asarray(want.pages).view(np.uint8)
    )
    index = table, jnp.asarray([0, 3], jnp.int32), jnp.asarray(starts([9, 8]))
    gather = jitted(ops.gather_latent, rows=20, dtype=jnp.float32, **more)
    rows = gather(found, put(index[0], TOKENS), put(index[1], TOKENS), index[2])
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(gather(want, *index)))
    pairs = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
    copied = jitted(ops.copy_blocks, **more)(found, put(pairs, TOKENS))
    np.testing.assert_array_equal(
        np.asarray(copied.pages).view(np.uint8),
        np.asarray(jitted(ops.copy_blocks, **more)(want, pairs).pages).view(np.uint8),
    )


@pytest.mark.slow
def test_an_xla_operation_starts_no_kernel(rng, monkeypatch):
    """``backend="xla"`` holds for everything that an operation calls, on an H200 too."""

    def kernel(*args, **kwargs):
        raise AssertionError("a Mosaic kernel was built")

    monkeypatch.setattr(DeviceInfo, "current", lambda: H200)
    monkeypatch.setattr(mosaic_lib, "kernel", kernel)
    sizes = {"num_pages": 4, "page": 16, "rank": 512, "rope": 64}
    cache = LatentCache.alloc(**sizes)
    dims = MLADims(heads=8, rank=512, nope=128, rope=64, v=128, q_rank=None)
    case = decode_case(rng, dims=dims, seq_lens=[3, 9], page=16, pad_tokens=0)
    q_latent, _, paged_cache, meta = case.args
    wanted = {"tokens": q_latent.shape[0], "heads": 8, "dtype": q_latent.dtype, "backend": "xla"}
    assert ops.plan_decode(meta, paged_cache, **wanted) is None
    state = ops.mla_decode(*case.args, scale=1.0, backend="xla")
    ops.merge_attn_states(state, state, backend="xla")
    x = jnp.zeros((2, 576), jnp.bfloat16)
    slots = jnp.asarray([1, 2], jnp.int32)
    ops.write_latent(cache, x[:, :512], x[:, 512:], slots, backend="xla")
    index = [jnp.zeros(s, jnp.int32) for s in ((1, 2), (1,), (2,))]
    ops.gather_latent(cache, *index, rows=4, dtype="bfloat16", backend="xla")
    case = prefill_case(rng, dims=dims, query_lens=[3, 2])
    ops.mla_prefill(*case.args, scale=1.0, backend="xla")
    with pytest.raises(AssertionError, match="a Mosaic kernel was built"):
        ops.mla_prefill(*case.args, scale=1.0, backend="mosaic")
    assert isinstance(state, AttnState)
