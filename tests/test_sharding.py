"""Heads divided over devices by ``jax.shard_map``: every operation, equal to one device's result.

The latent cache has no heads, so each device holds all of it and writes the same rows.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mla_jax import ops
from mla_jax.cache import LatentCache
from mla_jax.errors import ArgumentError
from mla_jax.metadata.mla import DecodeMetadata
from mla_jax.pallas.dense_decode import mosaic
from mla_jax.pallas.device import DeviceInfo
from mla_jax.types import cdiv
from tests.cases import V2_LITE, V3, Decode, Prefill, decode_case, draw, paged, prefill_case
from tests.compare import judge, same_bits

DEVICES = 2
HEADS = P(None, "heads")
DIMS = dataclasses.replace(V2_LITE, heads=32)
BACKENDS = [pytest.param("mosaic", marks=pytest.mark.gpu), "xla"]


@pytest.fixture
def sharded():
    """``jit`` of ``shard_map`` over two devices, which divides its arguments first.

    JAX cannot tell what varies between devices inside of a Pallas kernel: ``check_vma=False``.
    """
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} devices; the backend here has {len(jax.devices())}")
    mesh = jax.make_mesh((DEVICES,), ("heads",), devices=jax.devices()[:DEVICES])

    def sharded(fun, *specs, out, kind):
        checked = kind != "mosaic"
        run = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked)
        places = [NamedSharding(mesh, spec) for spec in specs]
        return lambda *args: jax.jit(run)(*map(jax.device_put, args, places))

    return sharded


def same_as_alone(sharded, run, divided, shared, kind):
    """Bit for bit what one device makes of the heads that each of them has."""
    given, specs = (*divided, *shared), [HEADS] * len(divided) + [P()] * len(shared)
    found = sharded(run, *specs, out=HEADS, kind=kind)(*given)
    heads = divided[0].shape[1] // DEVICES
    for i in range(DEVICES):
        own = slice(i * heads, (i + 1) * heads)
        alone = jax.jit(run)(*(x[:, own] for x in divided), *shared)
        same_bits(jax.tree.map(lambda x, own=own: np.asarray(x)[:, own], found), alone)
        assert np.isfinite(alone.out).all()


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_decode(rng, sharded, kind, heads):
    dims = dataclasses.replace(DIMS, heads=heads)
    case: Decode = decode_case(rng, dims=dims, seq_lens=[200, 0, 1, 700], page=64)
    q_latent, q_rope, cache, meta = case.args

    def run(q_latent, q_rope, cache, meta):
        tokens, local, _ = q_latent.shape
        plan = ops.plan_decode(
            meta, cache, tokens=tokens, heads=local, dtype=q_latent.dtype, backend=kind
        )
        return ops.mla_decode(
            q_latent, q_rope, cache, meta, scale=case.scale, backend=kind, plan=plan
        )

    same_as_alone(sharded, run, (q_latent, q_rope), (cache, meta), kind)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("dims", [DIMS, V3], ids=["32", "128"])
def test_prefill(rng, sharded, kind, dims):
    case: Prefill = prefill_case(rng, dims=dims, query_lens=[70, 0, 1, 130])

    def run(q, kv, k_rope, meta):
        return ops.mla_prefill(q, kv, k_rope, meta, scale=case.scale, backend=kind)

    q, kv, k_rope, meta = case.args
    same_as_alone(sharded, run, (q, kv), (k_rope, meta), kind)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_cache(rng, sharded, kind, format):
    """Rows written by all devices, and gathered by all, are those of one."""
    cache = LatentCache.alloc(num_pages=9, page=16, rank=512, rope=64, format=format)
    latent, rope = (
        jnp.asarray(rng.standard_normal((40, n)), jnp.bfloat16) for n in (cache.rank, cache.rope)
    )
    slots = jnp.asarray(rng.permutation(9 * 16)[:40], jnp.int32)
    table = jnp.asarray(rng.permutation(8)[None] + 1, jnp.int32)
    index = table, jnp.zeros((1,), jnp.int32), jnp.asarray([0, 100], jnp.int32)

    def run(cache, latent, rope, slots, index):
        cache = ops.write_latent(cache, latent, rope, slots, backend=kind)
        rows = ops.gather_latent(cache, *index, rows=100, dtype="bfloat16", backend=kind)
        return cache, rows

    alone = jax.jit(run)(cache, latent, rope, slots, index)
    found = sharded(run, *[P()] * 5, out=P(), kind=kind)(cache, latent, rope, slots, index)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        assert len(x.addressable_shards) == DEVICES
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(y))


@pytest.mark.parametrize("kind", BACKENDS)
def test_keys_divided(rng, sharded, kind):
    """Context parallelism: each device attends to its own keys, and the states are merged."""
    lens = [[130, 0, 3], [129, 7, 0]]  # of each device
    used = [sum(cdiv(n, 64) for n in own) for own in lens]
    halves = [
        paged(rng, own, dims=DIMS, page=64, width=3, spare=8 - n)
        for own, n in zip(lens, used, strict=True)
    ]
    q = draw(rng, 3, DIMS.heads, DIMS.row, dtype="bfloat16")
    pages = jnp.concatenate([cache.pages for cache, _, _ in halves])
    tables, seq_lens = jnp.stack([table for _, table, _ in halves]), jnp.asarray(lens, jnp.int32)
    first, scale = halves[0][0], DIMS.qk**-0.5

    def run(q, pages, tables, seq_lens):
        cache = dataclasses.replace(first, pages=pages)
        meta = DecodeMetadata(
            max_query_len=1,
            page_table=tables[0],
            seq_lens=seq_lens[0],
            query_starts=jnp.arange(4, dtype=jnp.int32),
        )
        latent, rope = q[..., : DIMS.rank], q[..., DIMS.rank :]
        state = ops.mla_decode(latent, rope, cache, meta, scale=scale, backend=kind)
        both = jax.lax.all_gather(state, "heads")
        states = [jax.tree.map(lambda x, i=i: x[i], both) for i in range(DEVICES)]
        return jax.tree.map(lambda x: x[None], ops.merge_attn_states(*states))

    own = P("heads")
    found = sharded(run, P(), own, own, own, out=own, kind=kind)(
        jnp.asarray(q), pages, tables, seq_lens
    )
    keys = [np.concatenate(both) for both in zip(*(rows for *_, rows in halves), strict=True)]
    parts = [
        (q[r : r + 1], k, k[:, : DIMS.rank], np.ones((1, len(k)), bool)) for r, k in enumerate(keys)
    ]
    case = SimpleNamespace(scale=scale, dtype="bfloat16")
    for out, lse in zip(np.asarray(found.out), np.asarray(found.lse), strict=True):
        judge(SimpleNamespace(out=out, lse=lse), case, parts)


def test_a_device_is_asked_for_within_shard_map(sharded):
    """What a backend is chosen for is the mesh's device, not whatever comes first."""
    found = []

    def run(x):
        found.append(DeviceInfo.current())
        return x

    sharded(run, P(), out=P(), kind="xla")(jnp.zeros(2))
    assert found == [DeviceInfo.of(jax.devices()[0])]


def test_kernels_refuse_the_check_of_what_varies(rng):
    """In words of ours, before Mosaic is asked."""
    case: Decode = decode_case(rng, dims=DIMS, seq_lens=[20, 3], page=16)
    mesh = jax.make_mesh((DEVICES,), ("heads",), devices=jax.devices("cpu")[:DEVICES])

    def run(q_latent, q_rope, cache, meta):
        return mosaic.dense_decode(
            q_latent, q_rope, cache.pages, cache.scale, meta.page_table, meta.seq_lens,
            meta.query_starts, max_query_len=1, scale=1.0, format=cache.format,
            out_dtype=q_latent.dtype, tuning=mosaic.heuristic(DIMS.heads // DEVICES, 1, workers=2),
        )  # fmt: skip

    divided = jax.shard_map(run, mesh=mesh, in_specs=(HEADS, HEADS, P(), P()), out_specs=HEADS)
    places = [NamedSharding(mesh, spec) for spec in (HEADS, HEADS, P(), P())]
    with pytest.raises(ArgumentError, match="check_vma=False"):
        jax.eval_shape(divided, *map(jax.device_put, case.args, places))
